"""The ops around a decoder layer's linears against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specgraph import ops

ROWS, IN, OUT, EPS = 5, 16, 12, 1e-5


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def normed64(x: Tensor, norm: Tensor | None) -> Tensor:
    x = x.double()
    return x if norm is None else x / (x.square().mean(1, keepdim=True) + EPS).sqrt() * norm.double()


def close(got: Tensor, wanted: Tensor) -> None:
    tolerance = 1e-5 if got.dtype == torch.float32 else 5e-2
    torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("extras", [False, True])
def test_norm_linear(dtype, norm, extras):
    x, weight = random(ROWS, IN, dtype=dtype), random(OUT, IN, seed=1, dtype=dtype)
    scale = random(IN, seed=2, dtype=dtype) if norm else None
    bias = random(OUT, seed=3, dtype=dtype) if extras else None
    residual = random(ROWS, OUT, seed=4, dtype=dtype) if extras else None
    wanted = normed64(x, scale) @ weight.double().T
    if bias is not None and residual is not None:
        wanted = wanted + bias.double() + residual.double()
    got = ops.norm_linear(x, scale, EPS, weight, bias, residual)
    assert got.dtype == dtype
    close(got, wanted)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_norm_gate_up(norm, bias):
    x, weight = random(ROWS, IN), random(2 * OUT, IN, seed=1)
    scale = random(IN, seed=2) if norm else None
    shift = random(2 * OUT, seed=3) if bias else None
    both = normed64(x, scale) @ weight.double().T + (0 if shift is None else shift.double())
    gate, up = both[:, :OUT], both[:, OUT:]
    close(ops.norm_gate_up(x, scale, EPS, weight, shift), gate / (1 + (-gate).exp()) * up)


@given(
    rows=st.integers(1, 6),
    out=st.integers(1, 8),
    groups=st.integers(1, 4),
    width=st.integers(1, 8),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    extras=st.booleans(),
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_fp8_linears(rows, out, groups, width, dtype, extras):
    """Products, one number after the other, of weights of which each row and group of columns has its own scale."""
    depth = groups * width
    x, weight = random(rows, depth, dtype=dtype), (random(2 * out, depth, seed=1) * 100).to(torch.float8_e4m3fn)
    scale = random(groups, 2 * out, seed=2).abs() / 100
    wide = torch.empty(2 * out, depth, dtype=torch.float64)
    for row in range(2 * out):
        for column in range(depth):
            wide[row, column] = float(weight[row, column]) * float(scale[column // width, row])
    norm = random(depth, seed=3, dtype=dtype) if extras else None
    bias = random(2 * out, seed=4, dtype=dtype) if extras else None
    residual = random(rows, 2 * out, seed=5, dtype=dtype) if extras else None
    both = normed64(x, norm) @ wide.T
    if bias is not None and residual is not None:
        both = both + bias.double()
        close(ops.norm_linear_fp8(x, norm, EPS, weight, scale, bias, residual), both + residual.double())
    else:
        close(ops.norm_linear_fp8(x, norm, EPS, weight, scale), both)
    gate, up = both.chunk(2, dim=-1)
    close(ops.norm_gate_up_fp8(x, norm, EPS, weight, scale, bias), gate / (1 + (-gate).exp()) * up)


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_pair_linear(norms, bias):
    ids, table, hidden = torch.tensor([3, 0, 9, 3, 1]), random(10, 6), random(ROWS, IN, seed=1)
    table_norm = random(6, seed=2) if norms else None
    hidden_norm = random(IN, seed=3) if norms else None
    weight, shift = random(OUT, 6 + IN, seed=4), random(OUT, seed=5) if bias else None
    pair = torch.cat([normed64(table[ids], table_norm), normed64(hidden, hidden_norm)], dim=1)
    wanted = pair @ weight.double().T + (0 if shift is None else shift.double())
    close(ops.pair_linear(ids, table, table_norm, hidden, hidden_norm, EPS, weight, shift), wanted)
