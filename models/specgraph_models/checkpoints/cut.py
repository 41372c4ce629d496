"""Cuts a head's vocabulary: it then drafts some of the target's tokens, and reads no more rows than theirs.

Drafts stay lossless, since the target verifies them. A token that the head can't draft is still sampled by the target
and handed over: heads take the target's ids.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from specgraph import ops
from specgraph.errors import RankError
from specgraph_models.checkpoints.draft_vocab import DraftVocabulary
from specgraph_models.errors import CheckpointError
from specgraph_models.parallel import TensorParallel

_LOG = logging.getLogger("specgraph")


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


def cut_vocabulary(head: CutHead, vocabulary: DraftVocabulary) -> None:
    """Let a head draft the tokens of `vocabulary` alone. Tokens that it could not draft before are left out.

    Each tensor with a row per draft token becomes a copy of the kept rows. Ranks that split the head make it together.

    Raises:
        CheckpointError: an id is not in the target's vocabulary, or the head can draft none of the tokens.
        RankError: ranks that split the head have different vocabularies.
    """
    wanted, offsets = vocabulary.token_ids, head.draft_to_target
    if (largest := int(wanted.max())) >= head.vocab_size:
        raise CheckpointError(
            f"{vocabulary.name} has the token id {largest}, the target's vocabulary has {head.vocab_size} tokens: the "
            "file is for another tokenizer; make one with `specgraph draft-vocab`"
        )
    drafted = torch.arange(head.draft_vocab_size)
    if offsets is not None:
        drafted += offsets.cpu()
    kept = torch.isin(drafted, wanted).nonzero()[:, 0]
    if not len(kept):
        raise CheckpointError(
            f"{vocabulary.name}: the drafter can draft none of its {len(wanted)} tokens, as it has a vocabulary of its "
            f"own of {head.draft_vocab_size} tokens; make one with `specgraph draft-vocab`"
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
