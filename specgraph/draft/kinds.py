"""The kinds of heads: the protocol that each implements, and the programs that draft with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from specgraph.attention.choose import check_trees
from specgraph.capture import AttentionStack
from specgraph.config import DraftConfig
from specgraph.draft.chain import ChainProgram
from specgraph.draft.ngram_head import NgramHead
from specgraph.draft.one_pass import BlockProgram, MaskedProgram, NgramProgram, ParallelProgram
from specgraph.draft.program import DraftProgram
from specgraph.draft.protocol import BlockHead, DraftHead, HeadKind, MaskedHead, ParallelHead, StepwiseHead
from specgraph.draft.round import RoundBuffers
from specgraph.draft.stepwise import StepwiseProgram
from specgraph.draft.tree import TreeProgram
from specgraph.errors import ConfigError, UnsupportedError


class Kind(NamedTuple):
    """One way of drafting."""

    protocol: type
    chains: type[DraftProgram[Any]]
    trees: type[DraftProgram[Any]] | None
    """The program of trees; None where it drafts none."""


KINDS: Mapping[HeadKind, Kind] = {
    "chain": Kind(DraftHead, ChainProgram, TreeProgram),
    "draft_model": Kind(DraftHead, ChainProgram, TreeProgram),
    "modules": Kind(StepwiseHead, StepwiseProgram, None),
    "masked": Kind(MaskedHead, MaskedProgram, MaskedProgram),
    "parallel": Kind(ParallelHead, ParallelProgram, ParallelProgram),
    "block": Kind(BlockHead, BlockProgram, None),
    "ngram": Kind(NgramHead, NgramProgram, None),
}


def programs_for(
    head: Any, stack: AttentionStack, config: DraftConfig, memory: RoundBuffers
) -> dict[bool, DraftProgram[Any]]:
    """Make the draft programs of a head, which share `memory`: of chains (False), of trees (True), or both where the
    schedule drafts both.

    ConfigError where the head cannot draft K tokens, UnsupportedError where it, or the attention, cannot draft trees.
    """
    kind, k, tree = KINDS[head.kind], config.num_speculative_tokens, config.tree
    if tree is not None and head.kind in ("ngram", "block"):
        what = "n-grams are" if head.kind == "ngram" else f"the block of a {type(head).__name__} is"
        raise UnsupportedError(f"{what} drafted as chains: leave out the draft tree")
    if tree is not None and kind.trees is None:
        raise UnsupportedError(
            f"the drafter has {head.num_modules} modules, one per draft token, and draft trees need one that is "
            "used at every step: load it with num_modules=1 (--num-modules 1)"
        )
    if tree is not None and kind.trees is TreeProgram:
        check_trees(stack.backend, head.attention_layers, head.dtype, config.block_size)
    if head.kind in ("parallel", "block") and k > head.max_speculative_tokens:
        raise ConfigError(
            f"num_speculative_tokens is {k}, and this parallel drafter was trained to fill "
            f"{head.max_speculative_tokens} masked positions; ask for at most that many"
        )
    if head.kind == "modules" and k > head.num_modules:
        raise ConfigError(
            f"num_speculative_tokens is {k}, and the drafter has {head.num_modules} modules, one per draft token; "
            "ask for fewer tokens, or load it with num_modules=1 (--num-modules 1) to reuse the first module "
            "at every step"
        )
    programs = {False: kind.chains(head, stack, config, memory, None)} if config.chain_lens else {}
    if tree is not None and kind.trees is not None:
        programs[True] = kind.trees(head, stack, config, memory, tree)
    return programs
