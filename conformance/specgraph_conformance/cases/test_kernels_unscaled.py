"""A linear with the norm that an argmax takes after it: the result is right up to a positive number per row."""

from __future__ import annotations

import pytest
import torch
from specgraph import kernels
from specgraph.platforms import Platform
from torch import Tensor

from specgraph_conformance.case import case
from specgraph_conformance.rig import WAYS, expect_close, on_host, run_op

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 6e-2}
EPS = 0.04
"""Of the norm. In rows of magnitude 0.02 it changes the length and not the direction."""


def _random(shape: tuple[int, ...], dtype: torch.dtype, seed: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


@pytest.mark.parametrize("rows", [5, 40, 133])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["fp32", "bf16"])
@case(
    "kernels.linear-norm-unscaled",
    "A linear 512 wide with its residual, with and without a bias, and its norm times any positive number per row, are "
    "within rounding of float64 in rows of every magnitude.",
    hazard="fused-linears",
    cause="linear_norm_unscaled: the residual or the bias left out, the norm's weight left out, another row's "
    "result, or a negative factor",
)
def test_linear_norm_unscaled(platform: Platform, way: str, dtype: torch.dtype, rows: int, seed: int) -> None:
    depth, size = 256, 512
    magnitude = torch.tensor([0.02, 1.0, 30.0])[torch.arange(rows) % 3][:, None]
    x = (_random((rows, depth), torch.float32, seed) * magnitude).to(dtype)
    residual = (_random((rows, size), torch.float32, seed + 1) * magnitude).to(dtype)
    weight, norm = _random((size, depth), dtype, seed + 2, 1 / 16), _random((size,), dtype, seed + 3)
    biases = None, _random((size,), dtype, seed + 4)
    a, r, w, n = (each.to(platform.device) for each in (x, residual, weight, norm))
    out = [torch.zeros(rows, size, dtype=dtype, device=platform.device) for _ in range(2)]

    for bias in biases:
        b = None if bias is None else bias.to(platform.device)

        def work(b: Tensor | None = b) -> None:
            for into, result in zip(out, kernels.linear_norm_unscaled(a, w, b, r, n, EPS), strict=True):
                into.copy_(result)

        run_op(platform, way, work, out)
        total = x.double() @ weight.double().T + residual.double() + (0 if bias is None else bias.double())
        largest = total.abs().amax(1, keepdim=True)
        what = f"with{'out' if bias is None else ''} a bias"
        expect_close(on_host(out[0]).double() / largest, total / largest, TOLERANCE[dtype], f"the sum {what}")
        direction = total * norm.double()
        direction /= direction.norm(dim=1, keepdim=True)
        seen = on_host(out[1]).double()
        found = seen / seen.norm(dim=1, keepdim=True)  # NaN where a row is zero
        expect_close(found * size**0.5, direction * size**0.5, TOLERANCE[dtype], f"the direction of the norm {what}")
