"""Fused linears and the attention ops against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from specgraph import ops
from specgraph.device import Platform
from torch import Tensor

from specgraph_conformance.attention_rows import Rows
from specgraph_conformance.case import case
from specgraph_conformance.linear_oracles import TOLERANCE, norm_weight, normed, random
from specgraph_conformance.rig import WAYS, expect_close, on_host, run_op, slot_of

EPS = 1e-6


@pytest.mark.parametrize("rows", [1, 4, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@case(
    "kernels.norm-linear",
    "A fused norm and projection is within rounding of float64.",
    cause="norm_linear on this device: the sum of squares or the product in the narrow type",
)
def test_norm_linear(platform: Platform, rows: int, dtype: torch.dtype, seed: int) -> None:
    x, norm = random((rows, 256), dtype, seed), norm_weight(256, dtype, seed + 1)
    weight = random((384, 256), dtype, seed + 2, 1 / 16)
    there = [t.to(platform.device) for t in (x, norm, weight)]
    seen = on_host(ops.norm_linear(there[0], there[1], EPS, there[2])).double()
    expect_close(seen, normed(x, norm, EPS) @ weight.double().T, TOLERANCE[dtype], "norm_linear")


@pytest.mark.parametrize(
    "op", ["paged_attention", "paged_attention_host", "rotate_store_attend", "rotate_store_attend_host"]
)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "not-causal"])
@case(
    "kernels.attention-ops",
    "Each attention op, after `rotate_and_store` or with its own storing of keys, gives float64's output and KV.",
    hazard="attention-op-rows",
    cause="an implementation of this op on this device; the cases of group attention look at one property each",
)
def test_attention_ops(platform: Platform, op: str, causal: bool, seed: int) -> None:
    query_lens, seq_lens = [4, 4, 4, 4, 4, 4, 4, 4, 4], [4, 37, 0, 90, 16, 17, 5, 64, 33]
    Rows(platform, "paged", query_lens, seq_lens, causal=causal, seed=seed).check(lambda rows: attend(rows, op))


def attend(rows: Rows, op: str) -> Tensor:
    """Run one attention op; those that only attend run after `rotate_and_store`."""
    m, cache, rotary = rows.metadata, rows.cache, rows.layer.rotary
    query, key, value = rows.device_rows
    options: dict[str, Any] = {"scale": rows.layer.scale, "causal": rows.causal}
    lengths, host = (m.seq_lens, m.query_start_loc), (list(rows.query_lens), list(rows.seq_lens))
    stored = rotary, m.positions, m.slot_mapping, cache.key, cache.value, m.block_table
    out = torch.zeros_like(query)
    if op == "rotate_store_attend":
        return ops.rotate_store_attend(query, key, value, *stored, *lengths, query_len=m.query_len, **options)
    if op == "rotate_store_attend_host":
        ops.rotate_store_attend_host(query, key, value, *stored, *host, out=out, **options)
        return out
    query = ops.rotate_and_store(query, key, value, rotary, m.positions, m.slot_mapping, cache.key, cache.value)
    if op == "paged_attention":
        keys = cache.key, cache.value, m.block_table
        return ops.paged_attention(query, *keys, *lengths, query_len=m.query_len, **options)
    ops.paged_attention_host(query, cache.key, cache.value, m.block_table, *host, out=out, **options)
    return out


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", ["contiguous", "strided"])
@pytest.mark.parametrize("rotated", [32, 48, 64])
@case(
    "kernels.rotate-and-store",
    "Rotary embedding of the first `rotated` of 64 elements passes the others through, and keys and values go to their "
    "slots in caches of any strides; a row without a slot writes nothing.",
    hazard="part-of-the-head-rotated",
    cause="rotate_and_store: pairs of elements counted over the whole head, or slots counted in a contiguous cache",
)
def test_rotate(platform: Platform, way: str, layout: str, rotated: int, seed: int) -> None:
    device, shape, blocks = platform.device, (9, 2, 64), 7
    query, key, value = (random(shape, torch.float32, seed + i) for i in range(3))
    angles = random((100, rotated // 2), torch.float32, seed + 3, 3.0)
    rotary = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions = torch.tensor([0, 99, 3, 3, 50, 17, 64, 63, 1])
    slots = torch.tensor([16, 111, -1, 40, 17, 95, -1, 64, 63])
    both = torch.zeros(blocks, 2, 16, 2, 64) if layout == "strided" else torch.zeros(2, blocks, 16, 2, 64)
    held = both.to(device)
    keys, values = held.unbind(1 if layout == "strided" else 0)
    rows, k, v, table, at, to = (t.to(device) for t in (query, key, value, rotary, positions, slots))
    out = torch.zeros(shape, device=device)
    run_op(platform, way, lambda: out.copy_(ops.rotate_and_store(rows, k, v, table, at, to, keys, values)), [out, held])

    def turned(x: Tensor) -> Tensor:
        half, x = rotated // 2, x.double()
        left, right, rest = x[..., :half], x[..., half:rotated], x[..., rotated:]
        cos, sin = angles[positions].double().cos()[:, None], angles[positions].double().sin()[:, None]
        return torch.cat((left * cos - right * sin, right * cos + left * sin, rest), dim=-1)

    expect_close(on_host(out), turned(query), 1e-5, f"queries with {rotated} of 64 elements rotated")
    wanted = torch.zeros(2, blocks * 16, 2, 64, dtype=torch.float64)
    live = slots >= 0
    wanted[0, slots[live]], wanted[1, slots[live]] = turned(key)[live], value.double()[live]
    for name, cache, expected in (("keys", keys, wanted[0]), ("values", values, wanted[1])):
        expect_close(on_host(cache).reshape(expected.shape), expected, 1e-5, f"{name} in {layout} caches")


@case(
    "kernels.advance",
    "advance moves the one row of each live request one token forward as a host loop does; inert requests stay inert.",
    hazard="metadata-not-rebuilt-between-steps",
    cause="advance: lengths, positions or slots that stay behind, or a slot past max_model_len or in the null block",
    quick=True,
)
def test_advance(platform: Platform) -> None:
    device, limit, block = platform.device, 48, 16
    lengths = [15, 16, 47, 0, 1, 31, 32, 46, 48]
    blocks = [[3 * r + 1, 3 * r + 2, 3 * r + 3 if r % 2 else 0] for r in range(len(lengths))]
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    positions, slots = (torch.full((len(lengths),), -77, device=device) for _ in range(2))
    step, table = torch.tensor([1], device=device), torch.tensor(blocks, dtype=torch.int32, device=device)
    written = seq_lens, positions, slots, step
    run_op(platform, "captured", lambda: ops.advance(*written, table, limit, block), written)
    wanted = [n + 1 if n else 0 for n in lengths]
    places = [min(max(n - 1, 0), limit - 1) for n in wanted]
    to = [slot_of(n - 1, row, limit, block) for n, row in zip(wanted, blocks, strict=True)]
    for name, tensor, expected in (
        ("lengths", seq_lens, wanted),
        ("positions", positions, places),
        ("slots", slots, to),
    ):
        now = on_host(tensor).tolist()
        assert now == expected, f"from lengths {lengths}, advance gave {name} {now} instead of {expected}"
    assert on_host(step).tolist() == [2]
