"""Cuts the vocabulary of a head over a host engine's weights."""

from __future__ import annotations

from pathlib import Path

from specgraph_models.checkpoints.cut import CutHead, cut_vocabulary
from specgraph_models.checkpoints.draft_vocab import read_draft_vocab
from specgraph_models.checkpoints.tokens import read_tokenizer


def cut_for_engine(head: CutHead, path: str, tokenizer: str | None) -> None:
    """Let a head draft the tokens of a file alone. The head gets a copy of their rows of the engine's weights.

    An update of the engine's weights in place does not change the copy: make the head again.

    Args:
        path: see `read_draft_vocab`.
        tokenizer: the engine's tokenizer. If it is a folder, it is compared with the one that the file names.

    Raises:
        CheckpointError: the file can't be read, or it is for another tokenizer or vocabulary.
        RankError: ranks that split the head have different files.
    """
    vocabulary = read_draft_vocab(path)
    if tokenizer is not None and (Path(tokenizer) / "tokenizer.json").exists():
        vocabulary.check_tokenizer(read_tokenizer(Path(tokenizer)), Path(tokenizer))
    cut_vocabulary(head, vocabulary)
