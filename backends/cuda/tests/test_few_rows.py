"""A linear of up to 32 rows in one CUDA kernel: plans fit, it compiles, and on a Hopper GPU it is right."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specgraph_cuda.few_rows_plan import MULTIPROCESSORS, Plan, cut, plan_for
from torch import Tensor

from specgraph.device import Platform
from specgraph.ops import Norm, Weight
from specgraph.ops.linear import normed

EPS = 0.02
SHAPES = [(8192, 6144), (4096, 32000), (14336, 4096), (2048, 3072), (512, 1000), (256, 40)]
"""Input and output columns: four in use, two of which the last part is not full."""


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    best=st.booleans(), rows=st.integers(1, 32),
    columns=st.sampled_from([40, 1000, 2048, 3072, 4096, 6144, 32000, 128256, 151936]),
)  # fmt: skip
def test_a_plan_fits_a_multiprocessor(best: bool, rows: int, columns: int) -> None:
    plan = cut(best, rows, columns)
    assert plan.rows >= rows
    assert plan.columns * plan.parts(columns) >= columns
    assert plan.blocks(columns) <= MULTIPROCESSORS
    assert plan.memory <= 227 << 10  # bytes of shared memory that a block may have
    assert plan.stage_bytes % 1024 == 0  # where the swizzle of a tensor copy begins anew
    assert plan.stages * plan.columns * plan.stage_tiles * 128 >= plan.window


def test_linears_that_were_not_timed_or_no_faster_stay_in_triton() -> None:
    assert plan_for(False, 1, 8192, 6144) == Plan(8, 48, 2, 0)
    assert plan_for(True, 16, 4096, 32000) == Plan(16, 128, 1, 1)
    assert plan_for(False, 32, 14336, 4096) == Plan(32, 32, 2, 0)
    assert plan_for(True, 17, 4096, 32000) is None
    for rows, depth, columns in ((0, 4096, 4096), (33, 4096, 4096), (1, 1024, 4096), (1, 4096, 1000)):
        assert plan_for(False, rows, depth, columns) is None


@pytest.mark.parametrize("rows", [1, 16, 32])
@pytest.mark.parametrize("best", [False, True])
@pytest.mark.parametrize("columns", [2048, 6144, 32000])
def test_it_compiles(best: bool, columns: int, rows: int) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    from specgraph_cuda import few_rows, hopper

    if (reason := hopper.why_not()) is not None:
        pytest.skip(reason)
    assert hopper.compiled(few_rows.source(cut(best, rows, columns)), "few_rows.cu")


@pytest.fixture
def hopper(platform: Platform) -> Platform:
    if torch.cuda.get_device_capability(platform.device) != (9, 0):
        pytest.skip("the kernel is for compute capability 9.0")
    torch.manual_seed(0)
    return platform


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda")


def problem(depth: int, columns: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and residual; rows have very different magnitudes, and lie in rows of more columns."""
    magnitude = torch.tensor([0.1, 1.0, 30.0], device="cuda").repeat(rows)[:rows, None]
    x = (random(rows, depth + 64) * magnitude).bfloat16()[:, :depth]
    residual = (random(rows, columns + 8) * magnitude).bfloat16()[:, :columns]
    return x, (random(columns, depth) * depth**-0.5).bfloat16(), residual


@pytest.mark.parametrize("rows", [1, 3, 8, 9, 16, 17, 24, 32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_linear_is_right(hopper: Platform, shape: tuple[int, int], rows: int) -> None:
    from specgraph_cuda.few_rows import few_rows

    linear = few_rows(lambda best, rows, depth, columns: cut(best, rows, columns)).linear
    x, weight, residual = problem(*shape, rows)
    product = x.double() @ weight.double().T
    for added, want in ((None, product), (residual, product + residual.double())):
        got = linear(x, weight, added)
        assert got is not None
        for row in range(rows):
            assert float((got[row].double() - want[row]).norm() / want[row].norm()) < 4e-3  # NaN fails too
        for _ in range(5):
            again = linear(x, weight, added)
            assert again is not None
            assert torch.equal(again, got)


@pytest.mark.parametrize("rows", [1, 3, 8, 9, 16, 17, 24, 32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_largest_of_each_part_is_found(hopper: Platform, shape: tuple[int, int], rows: int) -> None:
    """Against float64: the logit at the column that it names, and no other is larger by more than a rounding."""
    from specgraph_cuda.few_rows import few_rows

    depth, columns = shape
    plan = cut(True, rows, columns)
    best = few_rows(lambda *_: plan).best
    x, weight, _ = problem(depth, columns, rows)
    step, copy = torch.tensor([3], device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
    found = best(x, weight, step, copy)
    assert found is not None
    value, column = found
    assert value.shape == column.shape == (rows, plan.parts(columns))
    assert int(copy) == 3
    wide = x.double() @ weight.double().T
    for part in range(plan.parts(columns)):
        first = part * plan.columns
        logits = wide[:, first : first + plan.columns]
        assert bool(((column[:, part] >= first) & (column[:, part] < first + logits.shape[1])).all())
        most, close = logits.amax(1), 2e-2 * logits.abs().amax(1)
        named = wide.gather(1, column[:, part, None].long())[:, 0]
        assert bool(((most - named).abs() <= close).all())
        assert bool(((most - value[:, part]).abs() <= close).all())


def test_of_equals_the_first_is_the_largest_and_nan_is_none(hopper: Platform) -> None:
    from specgraph_cuda.few_rows import few_rows

    plan = replace(cut(True, 2, 1000), columns=64, stage_tiles=1)
    best = few_rows(lambda *_: plan).best
    x = torch.ones(2, 256, device="cuda").bfloat16()
    x[1] = float("nan")
    weight = torch.zeros(1000, 256, device="cuda").bfloat16()
    weight[[70, 71, 127, 990]] = 1
    found = best(x, weight, None, None)
    assert found is not None
    value, column = (each.tolist() for each in found)
    assert column[0] == [0, 70, *(64 * part for part in range(2, 15)), 990]
    assert value[0] == [0, 256, *[0] * 13, 256]
    assert value[1] == [float("-inf")] * 16
    assert column[1] == [64 * part for part in range(16)]


def test_the_device_s_kernel_is_asked_first_and_not_for_a_bias() -> None:
    pytest.importorskip("triton")
    from launched import Launched

    from specgraph.kernels.launch import FewRows, LaunchOptions

    asked: list[Tensor | None] = []

    def linear(x: Tensor, weight: Tensor, residual: Tensor | None) -> Tensor | None:
        asked.append(residual)
        return x if len(asked) < 3 else None

    def best(*_: Tensor | None) -> None:
        return None

    ops = Launched(LaunchOptions(few_rows=FewRows(linear, best)))
    x, weight = torch.randn(2, 8).double(), torch.randn(8, 8).double()
    assert ops.norm_linear(x, None, Weight(weight)) is x
    assert ops.norm_linear(x, None, Weight(weight), weight) is x
    product = x @ weight.T
    assert torch.equal(ops.norm_linear(x, None, Weight(weight)), product)
    assert torch.equal(ops.norm_linear(x, None, Weight(weight, weight[0])), product + weight[0])
    assert len(asked) == 3
    assert asked[1] is weight


def test_two_linears_with_a_norm_between_them_are_asked_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from launched import Launched

    from specgraph.kernels.launch import FewRows, LaunchOptions
    from specgraph.kernels.norm import NormOps

    def linear(x: Tensor, weight: Tensor, residual: Tensor | None) -> Tensor:
        product = x @ weight.T
        return 2 * (product if residual is None else product + residual)

    plain = staticmethod(lambda x, norm: x if norm is None else normed(x, *norm))
    monkeypatch.setattr(NormOps, "_normed", plain)  # its kernel needs a GPU
    ops = Launched(LaunchOptions(few_rows=FewRows(linear, lambda *_: None)))
    x, weight, following = torch.randn(2, 8).double(), torch.randn(6, 8).double(), torch.randn(4, 6).double()
    residual, norm = torch.randn(2, 6).double(), torch.randn(6).double()
    total, out = ops.linear_norm_linear(x, Weight(weight), residual, Norm(norm, EPS), Weight(following))
    assert torch.equal(total, linear(x, weight, residual))
    between = total * (total.square().mean(1, keepdim=True) + EPS).rsqrt() * norm
    assert torch.allclose(out, 2 * between @ following.T)
    own = Weight(weight, weight[:, 0])
    biased = ops.linear_norm_linear(x, own, residual, Norm(norm, EPS), Weight(following))
    assert torch.allclose(biased[0], x @ weight.T + weight[:, 0] + residual)
