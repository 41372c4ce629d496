"""Broken draft trees: masks, ties, slots, and what a verify leaves behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mutants.draft_ops import change_arguments, replace_op
from mutants.registry import mutant
from torch import Tensor

import specgraph.ops.tree
from specgraph import ops
from specgraph.ops import Mask
from specgraph.ops.begin_rows import Rows


@mutant("sibling-sees-sibling", "kernel")
def causal_in_the_tree(patch: pytest.MonkeyPatch) -> None:
    """Rows of a tree also attend to the rows of the tree before them, as if it were a chain."""

    def change(query: Any, cache: Any, table: Tensor, lengths: Any, mask: Mask, *rest: Any) -> tuple[Any, ...]:
        if mask.ancestors is not None:
            before = mask.ancestors.view(table.shape[0], -1).clone()
            for row in range(1, before.shape[1]):
                before[:, row] |= before[:, row - 1]
            mask = mask._replace(ancestors=before.flatten())
        return query, cache, table, lengths, mask, *rest

    change_arguments(patch, "paged_attention", change)


@mutant("ancestor-mask-shifted", "kernel")
def bits_begin_at_the_first_node(patch: pytest.MonkeyPatch) -> None:
    """The bits of a verify's rows count from the first node instead of the last token."""

    def broken(real: Any, given: Any, plan: Any, rows: Rows, *past: Any) -> None:
        real(given, plan, rows, *past)
        if rows.ancestors is not None:
            rows.ancestors.copy_((rows.ancestors >> 1) | 1)

    replace_op(patch, "begin_rows", broken)


@mutant("path-kv-not-moved", "kernel")
def nothing_moves(patch: pytest.MonkeyPatch) -> None:
    """Keys and values of an accepted path stay where the nodes were drawn."""
    replace_op(patch, "move_kv", lambda real, *args, **options: None)


@mutant("path-kv-not-moved-in-place", "kernel", hazard="path-kv-not-moved")
def moved_backwards(patch: pytest.MonkeyPatch) -> None:
    """Slots of an accepted path are exchanged: kept rows are copied over the nodes."""
    change_arguments(patch, "move_kv", lambda key, value, source, target: (key, value, target, source))


@mutant("rejected-node-kv-left-visible", "kernel")
def later_levels_visible(patch: pytest.MonkeyPatch) -> None:
    """Rows of a draft step also attend to the slots of later levels, where nodes of the round before are."""

    def broken(real: Any, logits: Any, ids: Any, step: Tensor, first: bool, candidates: Any, beams: ops.Beams) -> None:
        real(logits, ids, step, first, candidates, beams)
        k = beams.scores.shape[1]
        beams.ancestors.bitwise_or_(torch.ones_like(beams.ancestors).neg() << ((step + 1) * k))

    replace_op(patch, "grow_tree", broken)


@mutant("node-ties-differ", "kernel")
def higher_id_first(patch: pytest.MonkeyPatch) -> None:
    """Among equally likely tokens the highest id comes first."""
    real = specgraph.ops.tree.top_tokens

    def broken(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        log_probs, ids = real(logits.flip(-1), count)
        return log_probs, logits.shape[-1] - 1 - ids

    patch.setattr(specgraph.ops.tree, "top_tokens", broken)


@mutant("node-ties-differ-chosen", "kernel", hazard="node-ties-differ")
def later_node_first(patch: pytest.MonkeyPatch) -> None:
    """Among nodes of equal score the one that was drawn last is chosen."""

    def broken(real: Any, candidates: ops.Candidates, tree: ops.TreeNodes) -> None:
        later = torch.arange(candidates.scores.shape[1], device=candidates.scores.device) * 1e-5
        real(candidates._replace(scores=candidates.scores + later), tree)

    replace_op(patch, "choose_nodes", broken)


@mutant("parallel-block-rows-of-a-tree", "kernel", hazard="parallel-block-rows")
def tree_of_the_position_before(patch: pytest.MonkeyPatch) -> None:
    """The tree of a parallel drafter takes each position's tokens from the position before."""
    change_arguments(patch, "draft_block_tree", lambda logits, *rest: (logits.roll(1, 0), *rest))


@mutant("tree-slot-overlaps-next-request", "kernel")
def slots_counted_on(patch: pytest.MonkeyPatch) -> None:
    """Slots of a step's rows are counted on from the first one in memory, past the end of the request's block."""

    def broken(real: Any, *args: Any, **options: Any) -> None:
        real(*args, **options)
        slots = options["slot_mapping"].view(args[0].shape[0], -1)
        counted = slots[:, :1] + torch.arange(slots.shape[1], device=slots.device)
        slots.copy_(torch.where(slots >= 0, counted, slots))

    replace_op(patch, "advance_tree", broken)
