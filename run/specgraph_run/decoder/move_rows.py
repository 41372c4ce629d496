"""Moves of keys and values to the slots of the accepted path, after the verify of a tree."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specgraph import ops
from specgraph.attention import AttentionLayer, KVCache
from specgraph.attention.context_parallel import own_slots
from specgraph.parallel import ContextParallel
from specgraph_run.decoder import ops as decoder_ops


def move_rows(
    layers: Sequence[AttentionLayer], caches: Sequence[KVCache], from_slots: Tensor, to_slots: Tensor
) -> None:
    """Copy keys and values of all layers from `from_slots` to `to_slots`, int64 [M] each. A pair of slots that moves
    nothing is 0 and 0."""
    if (ranks := layers[0].ranks) is not None:
        move_between(caches, from_slots, to_slots, ranks)
        return
    for cache in caches:
        decoder_ops.move_kv(cache.key, cache.value, from_slots, to_slots)


def move_between(caches: Sequence[KVCache], slots: Tensor, to_slots: Tensor, ranks: ContextParallel) -> None:
    """Copy keys and values of all layers from `slots` to `to_slots`, int64 [M] each, also between ranks.

    It takes one collective. A pair of slots that moves nothing is 0 and 0.
    """
    own, to = own_slots(slots, ranks), own_slots(to_slots, ranks)
    each: list[Tensor] = []
    for cache in caches:
        for part in cache[:1] if cache.key is cache.value else cache:
            cells = part.view(torch.int8)  # the sum is over bytes: FP8 has no sum
            each.append(cells.view(-1, *cells.shape[2:]))
    held = [torch.where((own >= 0)[:, None], cells[own.clamp(min=0)].flatten(1), 0) for cells in each]
    moved = torch.cat(held, dim=1)
    ops.all_reduce(moved, ranks.group)
    for cells, rows in zip(each, moved.split([h.shape[1] for h in held], dim=1), strict=True):
        at = to.clamp(min=0)
        kept = torch.where((to >= 0)[:, None], rows, cells[at].flatten(1))
        cells.index_put_((at,), kept.view(-1, *cells.shape[1:]))
