"""Ops that one program of a device computes for all requests, with as many of them as fill more than a tile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from specgraph import ops
from specgraph.device import Platform
from specgraph.ops.kv_cache import bytes_of
from torch import Tensor

from specgraph_conformance.case import case
from specgraph_conformance.rig import WAYS, expect_close, expect_equal, on_host, run_op, slot_of

LIMIT, BLOCK = 60, 16


@pytest.mark.parametrize("way", WAYS)
@case(
    "kernels.places-of-many-requests",
    "For 300 requests, advance and advance_tree move lengths, positions and slots as a host loop does.",
    hazard="many-in-one-program",
    cause="advance or advance_tree: requests past a tile, or block tables read at another width",
)
def test_places(platform: Platform, way: str, seed: int) -> None:
    device, requests, k, tree_len = platform.device, 300, 8, 40
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, LIMIT + 1, (requests,), generator=g)
    lengths[::7] = 0
    wide = torch.randint(0, 900, (requests, 9), generator=g).int()
    table = wide.to(device)[:, 1:7]  # a part of a wider table
    blocks = wide[:, 1:7].tolist()
    seq_lens, step = lengths.int().to(device), torch.tensor([1], device=device)
    positions, slots = (torch.full((requests,), -77, device=device) for _ in range(2))
    base = lengths.int().to(device), (lengths - 1).clamp(min=0).to(device)
    tree: dict[str, Any] = {
        name: torch.full((requests * k,), -77, device=device) for name in ("positions", "slot_mapping")
    }
    tree |= {"seq_lens": torch.full((requests,), -77, dtype=torch.int32, device=device)}
    tree |= {"draft_step": torch.tensor([2], device=device)}
    limits: dict[str, Any] = {"tree_len": tree_len, "max_model_len": LIMIT, "block_size": BLOCK}

    def work() -> None:
        ops.advance(seq_lens, positions, slots, step, table, LIMIT, BLOCK)
        ops.advance_tree(*base, table, **limits, **tree)

    run_op(platform, way, work, [seq_lens, positions, slots, step, *tree.values()])
    before: list[int] = lengths.tolist()
    after = [n + 1 if n else 0 for n in before]
    assert on_host(seq_lens).tolist() == after
    assert on_host(positions).tolist() == [min(max(n - 1, 0), LIMIT - 1) for n in after]
    assert on_host(slots).tolist() == [slot_of(n - 1, row, LIMIT, BLOCK) for n, row in zip(after, blocks, strict=True)]
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
    assert [on_host(step).tolist(), on_host(tree["draft_step"]).tolist()] == [[2], [3]]


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


@pytest.mark.parametrize("keys", [50, 3000])
@pytest.mark.parametrize("way", WAYS)
@case(
    "kernels.tree-attention-in-half",
    "In bfloat16, with four query heads per key head, each of 48 rows attends to up to 3,000 keys and to its own "
    "ancestors as in float64.",
    hazard="trees-of-one-shape",
    cause="tree_attention: rows past a tile, splits of the keys that are merged wrongly, or words of another row",
)
def test_tree_attention(platform: Platform, way: str, keys: int, seed: int) -> None:
    device, rows, heads, kv_heads, dim = platform.device, 48, 8, 2, 64
    g = torch.Generator().manual_seed(seed)
    lengths = [keys + rows, 0, rows + 7]
    columns = -(-lengths[0] // BLOCK)
    table = (torch.randperm(3 * columns, generator=g) + 1).view(3, columns).int()
    query = torch.randn(3 * rows, heads, dim, generator=g).to(torch.bfloat16)
    caches = [torch.randn(3 * columns + 1, BLOCK, kv_heads, dim, generator=g).to(torch.bfloat16) for _ in range(2)]
    for place in range(columns):  # so large that a block that is left out shows, and adding up to little
        caches[1][table[0, place]] += (columns if place % 2 else -columns) / 4
    bits = torch.rand(3, rows, rows, generator=g) < 0.3
    sees = bits.tril(-1) | torch.eye(rows, dtype=torch.bool)
    words = (sees.long() << torch.arange(rows)).sum(-1).flatten()
    there = [t.to(device) for t in (query, *caches, table, torch.tensor(lengths, dtype=torch.int32), words)]
    out = torch.full_like(there[0], -7.0)
    run_op(platform, way, lambda: out.copy_(_attend(there, rows)), [out])
    seen = on_host(out).view(3, rows, heads, dim)
    assert not seen[1].any(), "an inert request has output"
    for r in (0, 2):
        k, v = (_of_heads(cache[table[r].long()].flatten(0, 1)[: lengths[r]], heads) for cache in caches)
        context = torch.ones(rows, lengths[r] - rows, dtype=torch.bool)
        mask = torch.cat((context, sees[r]), dim=1)
        scores = torch.einsum("rhd,nhd->hrn", query.view(3, rows, heads, dim)[r].double(), k) * 0.1
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        expect_close(seen[r], torch.einsum("hrn,nhd->rhd", weights, v), 3e-2, f"rows of request {r}")


def _attend(there: list[Tensor], rows: int) -> Tensor:
    query, keys, values, table, seq_lens, words = there
    return ops.tree_attention(query, keys, values, table, seq_lens, words, tree_len=rows, scale=0.1)


def _of_heads(cells: Tensor, heads: int) -> Tensor:
    """[n, kv_heads, dim] in float64, repeated for the query heads."""
    return cells.double().repeat_interleave(heads // cells.shape[1], dim=1)
