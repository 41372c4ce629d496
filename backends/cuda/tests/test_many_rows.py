"""Linears of 65 to 384 rows: plans fit the device, the kernel compiles, and on a GPU its products are right."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specgraph_cuda.many_rows_plan import BLOCKS, MEMORY, Plan, plan_for

from specgraph.platforms import Platform

PLANS = [Plan(3, 224, 4), Plan(2, 224, 5), Plan(3, 128, 5, split=2), Plan(2, 64, 9, split=2), Plan(2, 32, 4, split=4)]
"""Those in use, and one with a larger cluster."""


SHAPES = st.sampled_from([(14336, 4096, True), (4096, 4096, False), (4096, 14336, False), (6144, 4096, False)])


@settings(derandomize=True, deadline=None, max_examples=300)
@given(rows=st.integers(1, 600), shape=SHAPES)
def test_a_plan_fits_a_multiprocessor(rows: int, shape: tuple[int, int, bool]) -> None:
    columns, depth, gated = shape
    plan = plan_for(rows, columns, depth, gated)
    if plan is None:
        return
    assert 64 < rows <= 384
    blocks = -(-rows // plan.rows) * -(-columns // (plan.columns // (2 if gated else 1))) * plan.split
    assert blocks in (BLOCKS, 2 * BLOCKS)
    assert plan.memory <= MEMORY
    assert plan.split <= 8  # the largest cluster that every device takes
    assert columns % 8 == 0
    assert depth % 64 == 0
    assert plan.split <= depth // 64
    assert plan.columns <= 256
    assert plan.columns % (16 if gated else 8) == 0
    assert plan.rows % plan.split == 0
    # The sums, and what it takes to go on adding to them, are in the registers that a thread can have.
    assert plan.columns // 2 + 26 <= min(255, (64 << 10) // (128 * plan.groups) // 8 * 8)
    if plan.split > 1:
        assert plan.rows * (plan.columns + 8) * 4 <= plan.stages * 128 * (plan.rows + plan.columns)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_it_compiles(plan: Plan, gated: bool) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    from specgraph_cuda import many_rows

    if (reason := many_rows.why_not()) is not None:
        pytest.skip(reason)
    for half in (False, True):
        assert many_rows._compile(many_rows.source(plan, gated=gated, residual=not gated, half=half))


@pytest.fixture
def hopper(platform: Platform) -> Platform:
    if torch.cuda.get_device_capability(platform.device) != (9, 0):
        pytest.skip("the kernel is for compute capability 9.0")
    torch.manual_seed(0)
    return platform


def make(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 65, 128, 191, 192, 200, 500])
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_products_are_right(hopper: Platform, plan: Plan, rows: int, dtype: torch.dtype) -> None:
    from specgraph_cuda.many_rows import launch

    for columns, depth in ((1000, 512), (3072, 4096), (96, 1088)):
        x = make(rows, depth + 64, dtype=dtype)[:, :depth]
        weight = make(2 * columns, depth, dtype=dtype, scale=depth**-0.5)
        residual = make(rows, 2 * columns, dtype=dtype)
        wide = x.double() @ weight.double().T
        out = torch.full((rows, 2 * columns), float("nan"), dtype=dtype, device="cuda")
        launch(plan, x, weight, None, out, gated=False)
        assert off(out, wide) < 6e-3
        again = torch.full_like(out, float("nan"))
        launch(plan, x, weight, None, again, gated=False)
        assert torch.equal(out, again)
        launch(plan, x, weight, residual, out, gated=False)
        assert off(out, wide + residual.double()) < 6e-3
        out = torch.full((rows, columns), float("nan"), dtype=dtype, device="cuda")
        launch(plan, x, weight, None, out, gated=True)
        gate, up = wide.chunk(2, 1)
        assert off(out, torch.nn.functional.silu(gate) * up) < 6e-3


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_linear_waits_for_the_one_before(hopper: Platform, plan: Plan) -> None:
    """Each launch starts early and reads what the launch before it writes."""
    from specgraph_cuda.many_rows import launch

    weights = [make(1024, 1024, dtype=torch.bfloat16, scale=2 / 32) for _ in range(6)]
    first = make(192, 1024, dtype=torch.bfloat16)
    x, wide = first, first.double()
    for weight in weights:
        out = torch.full((192, 1024), float("nan"), dtype=torch.bfloat16, device="cuda")
        launch(plan, x, weight, None, out, gated=False)
        x, wide = out, wide @ weight.double().T
    assert off(x, wide) < 2e-2


def test_linears_of_many_rows_without_bias_take_the_device_s_kernel() -> None:
    pytest.importorskip("triton")
    from specgraph.kernels.triton.implement import TritonOps
    from specgraph.kernels.triton.launch import LaunchOptions

    taken: list[tuple[int, bool, bool]] = []

    def many_rows(
        x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, gated: bool
    ) -> torch.Tensor | None:
        taken.append((x.shape[0], residual is not None, gated))
        return x.new_full((x.shape[0], weight.shape[0] // (1 + gated)), 7) if x.shape[0] == 65 else None

    ops = TritonOps(LaunchOptions(many_rows=many_rows))
    x, weight, bias = torch.randn(65, 8).bfloat16(), torch.randn(4, 8).bfloat16(), torch.randn(4).bfloat16()
    residual = torch.randn(65, 4).bfloat16()
    assert bool((ops.norm_linear(x, None, 0.0, weight) == 7).all())
    assert bool((ops.norm_linear(x, None, 0.0, weight, None, residual) == 7).all())
    assert ops.norm_gate_up(x, None, 0.0, weight).shape == (65, 2)
    assert taken == [(65, False, False), (65, True, False), (65, False, True)]
    plain = torch.nn.functional.linear(x, weight, bias)
    assert torch.equal(ops.norm_linear(x, None, 0.0, weight, bias), plain)  # it adds no bias
    more = torch.cat((x, x))
    assert torch.equal(ops.norm_linear(more, None, 0.0, weight), torch.nn.functional.linear(more, weight))
    assert taken[3:] == [(130, False, False)]  # asked, but the library is faster
