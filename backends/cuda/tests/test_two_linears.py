"""Two linears with the residual sum and the norm between them, against float64 and against the single ops."""

from __future__ import annotations

import pytest
import torch
from interpreted import DEVICE, INTERPRETED, device, ops
from specgraph_models.kernels import linears
from torch import Tensor
from torch.nn import functional

from specgraph.ops import Norm, Weight

__all__ = ["device"]

ROWS = {
    torch.bfloat16: [1, 6, 17, 40, 65],
    torch.float16: [6, 65],
    torch.float32: [6],
}
EPS = 0.02


def make(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale).to(dtype).to(DEVICE)


def close(got: Tensor, want: Tensor, roundings: int = 1) -> None:
    most = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 3e-6}[got.dtype] * roundings
    assert float((got.double() - want).norm() / want.norm()) < most  # NaN fails too


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("dtype", "rows"), [(dtype, rows) for dtype in ROWS for rows in ROWS[dtype]])
def test_two_linears(dtype: torch.dtype, rows: int, biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED and dtype == torch.bfloat16:  # which the interpreter multiplies as integers
        dtype = torch.float16
        monkeypatch.setattr(linears, "WIDE", (torch.float16,))
    torch.manual_seed(rows)
    size, depth, inner = 256, 128, 40  # a multiple of a tile's depth, else the norm is a kernel of its own
    # Rows of very different magnitude: each is divided by its own root mean square.
    magnitude = torch.tensor([0.1, 1.0, 30.0]).repeat(rows)[:rows, None].to(DEVICE)
    x = make(rows + 64, depth, dtype=dtype)[:rows]
    residual = (make(rows, size + 8, dtype=torch.float32) * magnitude).to(dtype)[:, :size]
    weight, norm = make(size, depth, dtype=dtype, scale=1 / 16), make(size, dtype=dtype)
    following = make(2 * inner, size, dtype=dtype, scale=1 / 14)
    bias = make(size, dtype=dtype) if biased else None
    next_bias = make(2 * inner, dtype=dtype) if biased else None
    wide = x.double() @ weight.double().T + residual.double() + (0 if bias is None else bias.double())
    normed = wide * (wide.square().mean(1, keepdim=True) + EPS).rsqrt() * norm.double()
    product = normed @ following.double().T + (0 if next_bias is None else next_bias.double())
    before = x, Weight(weight, bias), residual, Norm(norm, EPS)
    total, got = ops().linear_norm_linear(*before, Weight(following, next_bias))
    close(total, wide)
    for part in range(min(rows, 3)):  # each magnitude for itself
        close(got[part::3], product[part::3])
    again, gated = ops().linear_norm_gate_up(*before, Weight(following, next_bias))
    assert torch.equal(again, total)
    assert torch.equal(total, ops().norm_linear(x, None, Weight(weight, bias), residual))
    gate, up = product.chunk(2, 1)
    close(gated, functional.silu(gate) * up, roundings=2)  # gate and up are rounded, then their product
