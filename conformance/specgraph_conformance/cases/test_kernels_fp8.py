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
