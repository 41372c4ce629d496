"""Ops that one program of a device computes for all requests, with as many of them as fill more than a tile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from specgraph import ops
from specgraph.device import Platform
from specgraph.ops.kv_cache import bytes_of

from specgraph_conformance.case import case
from specgraph_conformance.rig import WAYS, expect_equal, on_host, run_op, slot_of

LIMIT, BLOCK = 60, 16


@pytest.mark.parametrize("way", WAYS)
@case(
    "kernels.places-of-many-trees",
    "For 300 requests, advance_tree moves lengths, positions and slots as a host loop does.",
    hazard="many-in-one-program",
    cause="advance_tree: requests past a tile, or block tables read at another width",
)
def test_places(platform: Platform, way: str, seed: int) -> None:
    device, requests, k, tree_len = platform.device, 300, 8, 40
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, LIMIT + 1, (requests,), generator=g)
    lengths[::7] = 0
    wide = torch.randint(0, 900, (requests, 9), generator=g).int()
    table = wide.to(device)[:, 1:7]  # a part of a wider table
    blocks = wide[:, 1:7].tolist()
    base = lengths.int().to(device), (lengths - 1).clamp(min=0).to(device)
    tree: dict[str, Any] = {
        name: torch.full((requests * k,), -77, device=device) for name in ("positions", "slot_mapping")
    }
    tree |= {"seq_lens": torch.full((requests,), -77, dtype=torch.int32, device=device)}
    tree |= {"draft_step": torch.tensor([2], device=device)}
    limits: dict[str, Any] = {"tree_len": tree_len, "max_model_len": LIMIT, "block_size": BLOCK}
    run_op(platform, way, lambda: ops.advance_tree(*base, table, **limits, **tree), tree.values())
    before: list[int] = lengths.tolist()
    assert on_host(tree["seq_lens"]).tolist() == [n + tree_len if n else 0 for n in before]
    wanted = [min(n + 2, LIMIT - 1) for n in before for _ in range(k)]
    live = torch.tensor(before).repeat_interleave(k) > 0
    expect_equal(on_host(tree["positions"])[live], torch.tensor(wanted)[live], "positions of a tree's rows")
    # Rows of step 2 are behind 2 k others; the tree's rows have slots past max_model_len, too.
    room = len(blocks[0]) * BLOCK
    slots_of = [
        slot_of(n + 2 * k + j, row, room, BLOCK) if n else -1 for n, row in zip(before, blocks, strict=True)
        for j in range(k)
    ]  # fmt: skip
    expect_equal(on_host(tree["slot_mapping"]), torch.tensor(slots_of), "slots of a tree's rows")
    assert on_host(tree["draft_step"]).tolist() == [3]


@pytest.mark.parametrize("moves", [40, 300, 1500])
@pytest.mark.parametrize("way", WAYS)
@case(
    "kernels.many-moves-of-kv",
    "Up to 1,500 keys and values of 8 heads change their slots at once, all read before any is written, in caches of "
    "any strides.",
    hazard="many-in-one-program",
    cause="move_kv: moves past a tile, or one that reads what another has written",
)
def test_moves(platform: Platform, way: str, moves: int, seed: int) -> None:
    device, blocks, heads, dim = platform.device, 200, 8, 80
    g = torch.Generator().manual_seed(seed)
    held = torch.randn(blocks, 2, BLOCK, heads, dim, generator=g).to(torch.bfloat16)
    there = held.to(device, copy=True)
    keys, values = there.unbind(1)
    slots = torch.randperm((blocks - 1) * BLOCK, generator=g)[:moves] + BLOCK
    source = slots.roll(1)  # each goes to the slot of the next, so that an order of copies shows
    source[::5], to = 0, slots.clone()
    to[::5] = 0
    given = source.to(device), to.to(device)
    run_op(platform, way, lambda: ops.move_kv(keys, values, *given), [there])
    wanted = held.clone()
    for part in (0, 1):
        cells = held[:, part].flatten(0, 1)
        moved = cells.clone()
        moved[to] = cells[source]
        wanted[:, part] = moved.view(blocks, BLOCK, heads, dim)
    expect_equal(bytes_of(on_host(there)), bytes_of(wanted), "keys and values")
