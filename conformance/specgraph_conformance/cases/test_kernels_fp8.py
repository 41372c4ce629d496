"""Linears over FP8 weights against float64."""

from __future__ import annotations

import pytest
import torch
from specgraph import ops
from specgraph.device import Platform
from torch import Tensor

from specgraph_conformance.case import case
from specgraph_conformance.linear_oracles import TOLERANCE, gated, normed
from specgraph_conformance.rig import WAYS, expect_close, on_host, run_op

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
EPS = 1e-6


def _weights(rows: int, columns: int, groups: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """FP8 values, their scales, and the products of both in float64, number by number."""
    g = torch.Generator().manual_seed(seed)
    values = (torch.randn(rows, columns, generator=g) * 60).to(torch.float8_e4m3fn)
    scale = (0.5 + torch.rand(groups, rows, generator=g)) / (60 * columns**0.5)
    wide = values.double().reshape(rows, groups, columns // groups) * scale.double().t()[:, :, None]
    return values, scale, wide.reshape(rows, columns)


@pytest.mark.parametrize("way", WAYS)
@DTYPES
@pytest.mark.parametrize("groups", [1, 3])
@case(
    "kernels.linears-fp8",
    "Projections over FP8 weights, plain, gated and of a pair, are within rounding of float64's products with the "
    "dequantised weights, with a scale per row and with scales per row and block of columns.",
    cause="a scale of another row or block, e4m3 read as another format, or the scale left out",
    needs=("float8",),
)
def test_linears_fp8(platform: Platform, way: str, groups: int, dtype: torch.dtype, seed: int) -> None:
    rows, columns, out = 9, 384, 160
    g = torch.Generator().manual_seed(seed)
    x, residual = (torch.randn(rows, n, generator=g).to(dtype) for n in (columns, out))
    norm, bias = (1 + torch.randn(columns, generator=g) / 8).to(dtype), torch.randn(out, generator=g).to(dtype)
    table, ids = torch.randn(50, 128, generator=g).to(dtype), torch.randint(0, 50, (rows,), generator=g)
    values, scale, wide = _weights(out, columns, groups, seed)
    a, r, n, b, t, i, v, s = (h.to(platform.device) for h in (x, residual, norm, bias, table, ids, values, scale))
    results = [torch.zeros(rows, width, dtype=dtype, device=platform.device) for width in (out, out // 2, out)]

    def work() -> None:
        results[0].copy_(ops.norm_linear_fp8(a, n, EPS, v, s, b, r))
        results[1].copy_(ops.norm_gate_up_fp8(a, n, EPS, v, s, b))
        results[2].copy_(ops.pair_linear_fp8(i, t, n[:128], a[:, 128:], None, EPS, v, s, b))

    run_op(platform, way, work, results)
    plain = normed(x, norm, EPS) @ wide.T + bias.double()
    pair = torch.cat((normed(table[ids], norm[:128], EPS), x[:, 128:].double()), dim=-1) @ wide.T + bias.double()
    wanted = (plain + residual.double(), gated(plain), pair)
    for got, want, name in zip(
        results, wanted, ("norm_linear_fp8", "norm_gate_up_fp8", "pair_linear_fp8"), strict=True
    ):
        expect_close(on_host(got), want, 2 * TOLERANCE[dtype], name)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rows", [1, 3])
@DTYPES
@case(
    "kernels.fp8-cache",
    "A cache in e4m3 holds the nearest values, the largest one for those beyond it, and attention over it is within "
    "rounding of float64 over what it holds.",
    cause="rotate_store_attend: values that are not saturated, or a new key or value that is used before it is rounded",
    needs=("float8",),
)
def test_fp8_cache(platform: Platform, way: str, rows: int, dtype: torch.dtype, seed: int) -> None:
    g, dim, lengths, table = torch.Generator().manual_seed(seed), 64, [20, 0, 35], [[1, 2, 0], [0, 0, 0], [3, 4, 5]]
    query, key, value = (torch.randn(3 * rows, heads, dim, generator=g).to(dtype) for heads in (4, 2, 2))
    value[0, 0, :2] = torch.tensor([600.0, -600.0]).to(dtype)
    caches = [torch.randn(6, 16, 2, dim, generator=g).to(torch.float8_e4m3fn) for _ in range(2)]
    positions = [max(length - rows + i, 0) for length in lengths for i in range(rows)]
    slots = [
        table[r][p // 16] * 16 + p % 16 if lengths[r] else -1
        for r, p in zip([r for r in range(3) for _ in range(rows)], positions, strict=True)
    ]
    tensors = (query, key, value, torch.tensor(positions), torch.tensor(slots), *caches)
    q, k, v, where, to, keys, values = (t.to(platform.device) for t in tensors)
    blocks, sizes, starts = (
        torch.tensor(t, dtype=torch.int32, device=platform.device) for t in (table, lengths, range(0, 4 * rows, rows))
    )
    out = torch.zeros_like(q)

    def work() -> None:
        stored = (k, v, None, where, to, keys, values)
        out.copy_(ops.rotate_store_attend(q, *stored, blocks, sizes, starts, query_len=rows, scale=0.125))

    run_op(platform, way, work, [out])
    held = [c.double().view(-1, 2, dim) for c in caches]
    for cache, new in zip(held, (key, value), strict=True):
        for row, slot in enumerate(slots):
            if slot >= 0:
                cache[slot] = new[row].float().clamp(-448, 448).to(torch.float8_e4m3fn).double()
    for seen, want, name in zip((keys, values), held, ("keys", "values"), strict=True):
        expect_close(on_host(seen).double().view(-1, 2, dim), want, 0.0, f"the {name} in the cache")
    wanted = torch.zeros(3 * rows, 4, dim, dtype=torch.float64)
    for r, length in enumerate(lengths):
        cells = [table[r][p // 16] * 16 + p % 16 for p in range(length)]
        for i in range(rows if length else 0):
            row, seen = r * rows + i, cells[: length - rows + 1 + i]
            for head in range(4):
                scores = held[0][seen, head // 2] @ query[row, head].double() * 0.125
                wanted[row, head] = torch.softmax(scores, 0) @ held[1][seen, head // 2]
    limit = {torch.float32: 1e-3, torch.bfloat16: 3e-2}[dtype] * float(wanted.abs().max())
    expect_close(on_host(out).double(), wanted, limit, "attention over the cache")
