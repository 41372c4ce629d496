"""Broken draft trees: masks, ties, slots, and what a verify leaves behind."""

from __future__ import annotations

from typing import Any

import torch
from mutants.registry import mutant
from torch import Tensor

from specgraph import ops
from specgraph.ops import Mask
from specgraph.ops.begin_rows import Rows


@mutant("sibling-sees-sibling", "specgraph.ops:paged_attention")
def causal_in_the_tree(
    real: Any, query: Any, cache: Any, table: Tensor, lengths: Any, mask: Mask, *rest: Any, **options: Any
) -> Any:
    """Rows of a tree also attend to the rows of the tree before them, as if it were a chain."""
    if mask.ancestors is not None:
        before = mask.ancestors.view(table.shape[0], -1).clone()
        for row in range(1, before.shape[1]):
            before[:, row] |= before[:, row - 1]
        mask = mask._replace(ancestors=before.flatten())
    return real(query, cache, table, lengths, mask, *rest, **options)


@mutant("ancestor-mask-shifted", "specgraph.ops:begin_rows")
def bits_begin_at_the_first_node(real: Any, given: Any, plan: Any, rows: Rows, *past: Any) -> None:
    """The bits of a verify's rows count from the first node instead of the last token."""
    real(given, plan, rows, *past)
    if rows.ancestors is not None:
        rows.ancestors.copy_((rows.ancestors >> 1) | 1)


@mutant("path-kv-not-moved", "specgraph_run.decoder.ops:move_kv")
def nothing_moves(real: Any, *args: Any, **options: Any) -> None:
    """Keys and values of an accepted path stay where the nodes were drawn."""


@mutant("path-kv-not-moved-in-place", "specgraph_run.decoder.ops:move_kv")
def moved_backwards(real: Any, key: Any, value: Any, source: Any, target: Any) -> Any:
    """Slots of an accepted path are exchanged: kept rows are copied over the nodes."""
    return real(key, value, target, source)


@mutant("rejected-node-kv-left-visible", "specgraph.ops:grow_tree")
def later_levels_visible(
    real: Any, logits: Any, ids: Any, step: Tensor, first: bool, candidates: Any, beams: ops.Beams
) -> None:
    """Rows of a draft step also attend to the slots of later levels, where nodes of the round before are."""
    real(logits, ids, step, first, candidates, beams)
    k = beams.scores.shape[1]
    beams.ancestors.bitwise_or_(torch.ones_like(beams.ancestors).neg() << ((step + 1) * k))


@mutant("node-ties-differ", "specgraph.ops:grow_tree", "specgraph.ops:draft_block_tree")
def higher_id_first(real: Any, logits: Tensor, draft_to_target: Tensor | None, *rest: Any) -> None:
    """Among equally likely tokens the highest id comes first."""
    ids = torch.arange(logits.shape[-1], device=logits.device)
    offsets = torch.zeros_like(ids) if draft_to_target is None else draft_to_target
    real(logits.flip(-1), ids.flip(0) - ids + offsets.flip(0), *rest)


@mutant("node-ties-differ-chosen", "specgraph.ops:choose_nodes")
def later_node_first(real: Any, candidates: ops.Candidates, tree: ops.TreeNodes) -> None:
    """Among nodes of equal score the one that was drawn last is chosen."""
    later = torch.arange(candidates.scores.shape[1], device=candidates.scores.device) * 1e-5
    real(candidates._replace(scores=candidates.scores + later), tree)


@mutant("parallel-block-rows-of-a-tree", "specgraph.ops:draft_block_tree")
def tree_of_the_position_before(real: Any, logits: Any, *rest: Any) -> Any:
    """The tree of a parallel drafter takes each position's tokens from the position before."""
    return real(logits.roll(1, 0), *rest)


@mutant("tree-slot-overlaps-next-request", "specgraph.ops:advance_tree")
def slots_counted_on(real: Any, *args: Any, **options: Any) -> None:
    """Slots of a step's rows are counted on from the first one in memory, past the end of the request's block."""
    real(*args, **options)
    slots = options["slot_mapping"].view(args[0].shape[0], -1)
    counted = slots[:, :1] + torch.arange(slots.shape[1], device=slots.device)
    slots.copy_(torch.where(slots >= 0, counted, slots))
