"""Triton linears against their plain torch references in float64, at sizes where tiles end."""

from __future__ import annotations

import pytest
import torch
from against_float64 import close, make, triton_ops  # noqa: F401
from specgraph_models import ops as model_ops
from torch import Tensor

from specgraph import ops
from specgraph.device import Platform
from specgraph.ops import Norm, PairInput, Weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 3, 16, 17, 33, 64, 65, 130])
@pytest.mark.parametrize(
    ("columns", "depth"), [(4096, 4096), (6144, 8192), (4096, 14336), (2048, 8192), (1000, 512), (96, 192)]
)
def test_norm_linear(rows: int, columns: int, depth: int, dtype: torch.dtype) -> None:
    x, norm = make(rows, depth, dtype=dtype), make(depth, dtype=dtype)
    weight, bias = make(columns, depth, dtype=dtype, scale=depth**-0.5), make(columns, dtype=dtype)
    residual = make(rows, columns, dtype=dtype)
    wide = [t.double() for t in (x, norm, weight, bias, residual)]
    wanted = ops.norm_linear.reference(wide[0], Norm(wide[1], 1e-5), Weight(wide[2], wide[3]), wide[4])
    close(ops.norm_linear(x, Norm(norm, 1e-5), Weight(weight, bias), residual), wanted)
    close(ops.norm_linear(x, None, Weight(weight)), wide[0] @ wide[2].T)
    strided = make(rows, depth + 64, dtype=dtype)[:, :depth]
    close(ops.norm_linear(strided, None, Weight(weight)), strided.double() @ wide[2].T)


@pytest.mark.parametrize("rows", [1, 16, 40, 64, 100])
@pytest.mark.parametrize(("inner", "depth"), [(14336, 4096), (12288, 4096), (8192, 2048), (200, 256)])
def test_norm_gate_up(rows: int, inner: int, depth: int) -> None:
    x, norm, weight = make(rows, depth), make(depth), make(2 * inner, depth, scale=depth**-0.5)
    want = model_ops.norm_gate_up.reference(x.double(), Norm(norm.double(), 1e-5), Weight(weight.double()))
    close(model_ops.norm_gate_up(x, Norm(norm, 1e-5), Weight(weight)), want)


def fp8(rows: int, columns: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random FP8 weights, their scales, and their products in float64."""
    weight = make(rows, columns, scale=60).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale = torch.rand(groups, rows, device="cuda") * 0.01 * columns**-0.5
    wide = weight.double().view(rows, groups, -1) * scale.double().T[:, :, None]
    return weight, scale, wide.view(rows, columns)


@pytest.mark.parametrize(
    ("columns", "depth", "groups"), [(6144, 8192, 1), (4096, 14336, 112), (1000, 512, 4), (96, 192, 3), (64, 48, 1)]
)
@pytest.mark.parametrize(
    ("rows", "dtype"), [(1, torch.bfloat16), (17, torch.float16), (64, torch.bfloat16), (300, torch.bfloat16)]
)
def test_linears_over_fp8(
    platform: Platform, rows: int, columns: int, depth: int, groups: int, dtype: torch.dtype
) -> None:
    if torch.cuda.get_device_capability(platform.device) < (8, 9):
        pytest.skip("this GPU has no conversion from e4m3: the reference runs")
    weight, scale, wide = fp8(2 * columns, depth, groups)
    x, norm, bias = make(rows, depth, dtype=dtype), make(depth, dtype=dtype), make(2 * columns, dtype=dtype)
    residual = make(rows, 2 * columns, dtype=dtype)
    own, dense = Weight(weight, bias, scale), Weight(wide, bias.double())
    wide_norm, norm_ = Norm(norm.double(), 1e-5), Norm(norm, 1e-5)
    want = ops.norm_linear.reference(x.double(), wide_norm, dense, residual.double())
    close(ops.norm_linear(x, norm_, own, residual), want)
    skipped = ops.norm_linear(x, None, Weight(weight, None, scale).rows(slice(columns, None)))
    close(skipped, x.double() @ wide[columns:].T)
    close(model_ops.norm_gate_up(x, norm_, own), model_ops.norm_gate_up.reference(x.double(), wide_norm, dense))
    table, ids = make(100, depth - 32, dtype=dtype), torch.randint(0, 100, (rows,), device="cuda")
    pair, wide_pair = PairInput(table, None, None, 1e-5), PairInput(table.double(), None, None, 1e-5)
    want = model_ops.pair_linear.reference(ids, x[:, :32].double(), wide_pair, dense)
    close(model_ops.pair_linear(ids, x[:, :32], pair, own), want)


@pytest.mark.parametrize("rows", [1, 17, 64, 200])
@pytest.mark.parametrize("width", [4096, 1000])
def test_pair_linear(rows: int, width: int) -> None:
    table, norms, hidden = make(100, width), (make(width), make(4096)), make(rows, 4096)
    weight, ids = make(6144, width + 4096, scale=8192**-0.5), torch.randint(0, 100, (rows,), device="cuda")
    for first, second in (norms, (None, None), (norms[0], None)):
        wide = [None if norm is None else norm.double() for norm in (first, second)]
        pair = PairInput(table.double(), *wide, 1e-5)
        want = model_ops.pair_linear.reference(ids, hidden.double(), pair, Weight(weight.double()))
        close(model_ops.pair_linear(ids, hidden, PairInput(table, first, second, 1e-5), Weight(weight)), want)
