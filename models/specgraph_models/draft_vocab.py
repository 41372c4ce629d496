"""A draft vocabulary, and heads that are cut to it. A cut head drafts these tokens of the target alone, and reads only
their rows of lm_head.

The output stays lossless, since the target verifies every draft. A token that the head can't draft is still sampled by
the target and handed over: heads take the target's ids.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from specgraph import ops
from specgraph.errors import ConfigError, RankError
from specgraph.validation import checked, shown
from specgraph_models.errors import CheckpointError
from specgraph_models.parallel import TensorParallel

_LOG = logging.getLogger("specgraph")
MAKE = "make one with `specgraph draft-vocab`"
"""The end of messages about files of draft vocabularies."""


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """The tokens that a drafter may draft."""

    name: str
    """The file, for messages."""
    token_ids: Tensor
    """int64 [n], on the CPU: the target's ids, each one once, in any order."""
    tokenizer: str | None = None
    """The `tokenizer_digest` of the tokenizer whose ids these are. None if the file does not tell."""
    covers: float | None = None
    """The share of the counted text that these tokens cover. None if the file does not tell."""

    def __post_init__(self) -> None:
        """Raise CheckpointError if there is no id, if an id is negative, or if one is there twice."""
        ids = self.token_ids
        if not ids.numel():
            raise CheckpointError(f"{self.name} has no token ids; {MAKE}")
        if int(ids.min()) < 0:
            raise CheckpointError(f"{self.name} has the token id {int(ids.min())}; ids begin at 0: {MAKE}")
        values, counts = ids.unique(return_counts=True)
        if len(values) < len(ids):
            twice = int(values[counts > 1][0])
            raise CheckpointError(f"{self.name} has the token id {twice} twice; each id counts once: {MAKE}")


@runtime_checkable
class CutHead(Protocol):
    """The members of a head whose vocabulary can be cut."""

    @property
    def vocab_size(self) -> int:
        """The size of the target's vocabulary."""
        ...

    @property
    def draft_vocab_size(self) -> int: ...
    @property
    def draft_to_target(self) -> Tensor | None: ...
    @property
    def tensor_parallel(self) -> TensorParallel: ...
    def weights(self) -> Mapping[str, Tensor]: ...
    def keep_tokens(self, draft_ids: Tensor) -> None:
        """Draft these tokens alone, int64 [n], ascending: copy their rows of all tensors that have a row per draft
        token. The copies are ascending too."""
        ...


@checked
def cut_vocabulary(head: CutHead, vocabulary: DraftVocabulary) -> None:
    """Let a head draft the tokens of `vocabulary` alone. Tokens that it could not draft before are left out.

    Each tensor with a row per draft token becomes a copy of the kept rows. Ranks that split the head make it together.

    Raises:
        ConfigError: the head has no vocabulary that can be cut, as an `NgramHead`.
        CheckpointError: an id is not in the target's vocabulary, or the head can draft none of the tokens.
        RankError: ranks that split the head have different vocabularies.
    """
    given: Any = head
    if not isinstance(given, CutHead):
        raise ConfigError(f"head must be a head that `load_drafter` returns (CutHead), got {shown(given)}")
    wanted, offsets = vocabulary.token_ids, head.draft_to_target
    if (largest := int(wanted.max())) >= head.vocab_size:
        raise CheckpointError(
            f"{vocabulary.name} has the token id {largest}, the target's vocabulary has {head.vocab_size} tokens: the "
            f"file is for another tokenizer; {MAKE}"
        )
    drafted = torch.arange(head.draft_vocab_size)
    if offsets is not None:
        drafted += offsets.cpu()
    kept = torch.isin(drafted, wanted).nonzero()[:, 0]
    if not len(kept):
        raise CheckpointError(
            f"{vocabulary.name}: the drafter can draft none of its {len(wanted)} tokens, as it has a vocabulary of its "
            f"own of {head.draft_vocab_size} tokens; {MAKE}"
        )
    _compare_ranks(vocabulary.name, kept, head)
    before = head.draft_vocab_size
    if len(kept) < before:
        head.keep_tokens(kept)
    absent = f"; it can't draft {missing} more of the file's" if (missing := len(wanted) - len(kept)) else ""
    _LOG.info("%s: the drafter drafts %d of its %d tokens%s", vocabulary.name, len(kept), before, absent)


def _compare_ranks(name: str, kept: Tensor, head: CutHead) -> None:
    """Raise RankError on every rank if ranks that split a head keep different tokens of it."""
    ranks = head.tensor_parallel
    if ranks.size == 1:
        return
    digest = int(hashlib.sha256(kept.numpy().tobytes()).hexdigest()[:15], 16)
    mine = torch.tensor([[len(kept), digest]], device=head.weights()["lm_head"].device)
    if bool((ops.all_gather(mine, ranks.group, ranks.size).view(ranks.size, 2) != mine).any()):
        raise RankError(f"{name} has other tokens on other ranks: give every rank the same file", everywhere=True)
