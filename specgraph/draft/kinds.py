"""The kinds of drafters by name, and the programs and checks that a head's kind decides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from specgraph.attention import AttentionBackend
from specgraph.capture import AttentionStack
from specgraph.config import DraftConfig
from specgraph.draft.batch import SharedBuffers
from specgraph.draft.block import BlockKind
from specgraph.draft.chain import ChainKind, DraftModelKind
from specgraph.draft.head_checks import ATTENTION, TREES, HeadCheck, check_protocol
from specgraph.draft.masked import MaskedKind
from specgraph.draft.modules import ModulesKind
from specgraph.draft.ngram import NgramKind
from specgraph.draft.parallel import ParallelKind
from specgraph.draft.program import DraftProgram, Kind
from specgraph.draft.protocol import DraftHead, Head, HeadKind

KINDS: Mapping[HeadKind, Kind[Any]] = {
    "chain": ChainKind(),
    "draft_model": DraftModelKind(),
    "modules": ModulesKind(),
    "masked": MaskedKind(),
    "parallel": ParallelKind(),
    "block": BlockKind(),
    "ngram": NgramKind(),
}


def kind_of(head: Head) -> Kind[Any]:
    """Return the kind of a head."""
    return KINDS[head.kind]


def programs_for(
    head: Head, stack: AttentionStack, config: DraftConfig, memory: SharedBuffers
) -> dict[bool, DraftProgram[Any, Any]]:
    """Make the draft programs of a head: for chains (False), for trees (True), or both if the schedule drafts both.
    They share `memory`.

    Raises ConfigError if the head cannot draft K tokens. Raises UnsupportedError if the head or the attention cannot
    draft trees.
    """
    kind, tree = kind_of(head), config.tree
    kind.check_limits(head, config, stack)
    offset = kind.position_offset
    programs = {False: kind.chains(head, stack, config, memory, None, offset)} if config.chain_lens else {}
    if tree is not None and kind.trees is not None:
        programs[True] = kind.trees(head, stack, config, memory, tree, offset)
    return programs


def check_members(attention: Any, head: Any = None, trees: bool = False) -> None:
    """Check the members of an attention backend, and of a head if one is given. Raises ConfigError if a member of the
    protocol is missing or has another type.

    Args:
        trees: check the members that draft trees need, too.
    """
    needed = (*ATTENTION, *TREES) if trees else ATTENTION
    check_protocol("attention backend", attention, AttentionBackend, needed, [*TREES, "preferred_block_size"])
    if head is None:
        return
    check_protocol("head", head, DraftHead, ("kind",))
    check_protocol("head", head, kind_of(head).protocol)


@torch.no_grad()
def check_passes(head: Any, rows: int, device: torch.device) -> None:
    """Run each method of a head once, on zeros and with attention that only checks shapes, and check its results.

    Raises ConfigError if a method fails, if a tensor has another shape, dtype or device than the protocol demands, or
    if `logits` does not compute the linear in `projection`.
    """
    check = HeadCheck(head, rows, device)
    check.tensors()
    kind_of(head).check(check)
