"""Linears of many rows: plans fit the device, the kernel compiles, and on a GPU its products are right."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specgraph_cuda.many_rows_plan import BLOCKS, MULTIPROCESSORS, Kind, Plan, plan_for

from specgraph.device import Platform
from specgraph.ops import Weight

PLANS = [
    *(Plan(3, 224, 4), Plan(2, 224, 5), Plan(2, 192, 5), Plan(2, 64, 4)),
    *(Plan(1, 112, 5), Plan(1, 144, 4), Plan(1, 224, 3)),
]
"""Gated ones in use, and a smaller one."""
PARTS = [
    Plan(3, 96, 6, 3, "PARTS"),
    Plan(3, 192, 4, 6, "PARTS"),
    Plan(1, 96, 11, 3, "PARTS"),
    Plan(1, 128, 9, 2, "PARTS"),
    Plan(1, 8, 2, 1, "PARTS"),
]
MOST = 227 << 10
"""Bytes of shared memory that the blocks of a multiprocessor may have."""
BEST = [Plan(1, 128, 4, 1, "BEST"), Plan(2, 248, 4, 1, "BEST"), Plan(3, 248, 3, 1, "BEST"), Plan(1, 8, 2, 1, "BEST")]


@settings(derandomize=True, deadline=None, max_examples=600)
@given(
    kind=st.sampled_from(["GATED", "PARTS", "BEST"]), rows=st.integers(1, 600),
    columns=st.sampled_from([14336, 14344, 12288, 4096, 18944, 28672, 9728, 5120, 10240, 32000, 128256]),
    depth=st.sampled_from([4096, 4160, 12288, 14336, 2560, 28672, 64]),
)  # fmt: skip
def test_a_plan_fits_a_multiprocessor(kind: Kind, rows: int, columns: int, depth: int) -> None:
    plan = plan_for(kind, rows, columns, depth)
    if plan is None:
        return
    assert plan.kind == kind
    assert rows <= 384
    row_blocks = -(-rows // plan.rows)
    assert row_blocks <= 2
    blocks, each = -(-columns // plan.written) * plan.split, 1 if plan.memory > MOST // 2 - 1024 else 2
    if rows > 64 and kind != "BEST":  # nearly all multiprocessors have a block at once, and none two of the same rows
        assert BLOCKS - 4 < blocks <= MULTIPROCESSORS
    elif kind == "PARTS":
        assert 80 <= blocks <= 132
    elif rows <= 64 and kind == "BEST":
        assert blocks <= each * 132
    assert plan.split == 1 or kind == "PARTS"
    assert depth // 64 >= plan.split
    assert plan.memory <= MOST
    assert columns % 8 == 0
    assert depth % 64 == 0
    assert plan.columns <= 256
    assert plan.columns % (16 if kind == "GATED" else 8) == 0
    # The sums, and what it takes to go on adding to them, are in the registers that a thread can have.
    assert plan.columns // 2 + 26 <= min(255, (64 << 10) // (128 * plan.groups * each) // 8 * 8)


@pytest.mark.parametrize("plan", PLANS + PARTS + BEST, ids=str)
def test_it_compiles(plan: Plan) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    from specgraph_cuda import hopper, many_rows

    if (reason := hopper.why_not()) is not None:
        pytest.skip(reason)
    assert hopper.compiled(many_rows.source(plan), "many_rows.cu")


@pytest.fixture
def hopper(platform: Platform) -> Platform:
    if torch.cuda.get_device_capability(platform.device) != (9, 0):
        pytest.skip("the kernel is for compute capability 9.0")
    torch.manual_seed(0)
    return platform


def make(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("rows", [1, 65, 128, 191, 192, 200, 500])
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_products_are_right(hopper: Platform, plan: Plan, rows: int) -> None:
    from specgraph_cuda.many_rows import launch

    for columns, depth in ((1000, 512), (14336, 4096), (12288, 4096), (96, 1088)):
        x = make(rows, depth + 64)[:, :depth]
        weight = make(2 * columns, depth, scale=depth**-0.5)
        gate, up = (x.double() @ weight.double().T).chunk(2, 1)
        out, again = (torch.full((rows, columns), float("nan"), dtype=torch.bfloat16, device="cuda") for _ in range(2))
        launch(plan, x, weight, out)
        assert off(out, torch.nn.functional.silu(gate) * up) < 6e-3
        launch(plan, x, weight, again)
        assert torch.equal(out, again)


@pytest.mark.parametrize("rows", [1, 65, 192, 200])
@pytest.mark.parametrize("plan", PARTS, ids=str)
def test_parts_add_up_to_the_product(hopper: Platform, plan: Plan, rows: int) -> None:
    from specgraph_cuda.many_rows import linears

    for columns, depth in ((1000, 512), (4096, 14336), (96, 1088)):
        x = make(rows, depth + 64)[:, :depth]
        weight = make(columns, depth, scale=depth**-0.5)
        own = linears(lambda *shape: plan)
        parts = own.parts(x, weight)
        assert parts is not None
        assert parts.shape == (plan.split, rows, columns)
        assert off(parts.double().sum(0), x.double() @ weight.double().T) < 1e-4
        again = own.parts(x, weight)
        assert again is not None
        assert torch.equal(parts, again)


@pytest.mark.parametrize("rows", [1, 33, 64, 100, 192, 256])
@pytest.mark.parametrize("plan", BEST, ids=str)
def test_the_best_of_each_tile_is_that_of_the_logits(hopper: Platform, plan: Plan, rows: int) -> None:
    """Small whole numbers, whose products are exact in any order: values, columns and the first of equals."""
    from specgraph_cuda.many_rows import linears

    own = linears(lambda *shape: plan)
    for columns, depth in ((1000, 512), (32000, 1024), (96, 1088)):
        x, weight = (
            torch.randint(-2, 3, shape, device="cuda").bfloat16() for shape in ((rows, depth), (columns, depth))
        )
        logits = (x.double() @ weight.double().T).bfloat16().float()
        step, copy = torch.tensor([5], device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
        found = own.best(x, weight, step, copy)
        assert found is not None
        for tile, first in enumerate(range(0, columns, plan.columns)):
            value, at = logits[:, first : first + plan.columns].max(1)
            same = logits[:, first : first + plan.columns] == value[:, None]
            assert torch.equal(found[0][:, tile], value)
            assert torch.equal(found[1][:, tile].long(), first + same.int().argmax(1)), at
        assert found[0].shape == found[1].shape == (rows, -(-columns // plan.columns))
        assert int(copy) == 5


def test_a_row_of_nan_has_no_best(hopper: Platform) -> None:
    from specgraph_cuda.many_rows import linears

    x, weight = make(40, 512), make(1000, 512)
    x[3] = float("nan")
    found = linears(lambda *shape: BEST[0]).best(x, weight, None, None)
    assert found is not None
    assert bool((found[0][3] == -float("inf")).all())
    assert bool(found[0][4].isfinite().all())


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_linear_waits_for_the_one_before(hopper: Platform, plan: Plan) -> None:
    """Each launch starts early and reads what the launch before it writes."""
    from specgraph_cuda.many_rows import launch

    weights, rows = list[torch.Tensor](), [make(192, 1024)]
    wide = rows[0].double()
    for _ in range(6):  # each weight divided by the size of its rows, so that none overflows
        weights.append(make(2048, 1024, scale=1 / 32 / float(wide.square().mean().sqrt())))
        gate, up = (wide @ weights[-1].double().T).chunk(2, 1)
        wide = torch.nn.functional.silu(gate) * up
    outs = [torch.full((192, 1024), float("nan"), dtype=torch.bfloat16, device="cuda") for _ in weights]
    for weight, out in zip(weights, outs, strict=True):
        launch(plan, rows[-1], weight, out)
        rows.append(out)
    for x, weight, out in zip(rows, weights, outs, strict=False):
        gate, up = (x.double() @ weight.double().T).chunk(2, 1)
        assert off(out, torch.nn.functional.silu(gate) * up) < 6e-3


def test_gated_linears_of_many_rows_without_bias_take_the_device_s_kernel() -> None:
    pytest.importorskip("triton")
    from launched import Launched
    from specgraph_models.ops import norm_gate_up

    from specgraph.kernels.launch import LaunchOptions, ManyRows

    taken: list[int] = []

    def gated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
        taken.append(x.shape[0])
        return x.new_full((x.shape[0], weight.shape[0] // 2), 7)

    ops = Launched(LaunchOptions(many_rows=ManyRows(lambda *_: True, gated, lambda x, weight: None, lambda *_: None)))
    x, weight = torch.randn(65, 8).bfloat16(), torch.randn(4, 8).bfloat16()
    assert bool((ops.norm_gate_up(x, None, Weight(weight)) == 7).all())
    assert taken == [65]
    assert norm_gate_up.reference(x, None, Weight(weight)).shape == (65, 2)


def test_only_hopper_has_the_kernel(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("triton")
    from specgraph_cuda.kernels import kernels_of

    caplog.set_level("INFO")
    for major, minor, units in ((8, 0, 108), (9, 0, 114), (10, 0, 148)):
        found = SimpleNamespace(major=major, minor=minor, multi_processor_count=units)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, found=found: found)
        assert kernels_of(torch.device("cuda", 0)) == {}
    assert not caplog.messages
    found = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setitem(sys.modules, "specgraph_cuda.many_rows", None)
    assert kernels_of(torch.device("cuda", 0)) == {}
    (message,) = caplog.messages
    assert "cuda-bindings is not installed" in message


def test_code_that_the_driver_refuses_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    from specgraph_cuda import hopper, many_rows

    def refused() -> bytes:
        raise RuntimeError("a binary for another driver\nand a log of many lines")

    monkeypatch.setattr(hopper, "compilation", lambda *of: SimpleNamespace(result=refused))  # a cache may hold it
    hopper.loaded.cache_clear()
    x, weight = (torch.empty(rows, 4096, dtype=torch.bfloat16) for rows in (96, 24576))
    assert many_rows.linears().gated(x, weight) is None
    assert many_rows.linears().gated(x, weight) is None
    (message,) = (message for message in caplog.messages if "a binary for another driver" in message)
    assert "\n" not in message
    hopper.loaded.cache_clear()


def test_rows_that_a_tensor_copy_refuses_are_left_to_the_library() -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    from specgraph_cuda.hopper import is_aligned

    rows = torch.empty(96 * 4096 + 8, dtype=torch.bfloat16)
    whole = rows[:-8].view(96, 4096)
    assert is_aligned(whole)
    assert is_aligned(whole[:, 8:72])
    for refused in (whole[:, 1:65], whole.view(-1)[:64].expand(96, 64), whole.T, rows[: 95 * 4095].view(95, 4095)):
        assert not is_aligned(refused)


def test_a_plan_with_more_splits_than_tiles_is_left_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block without input columns would write sums that it never set."""
    pytest.importorskip("cuda.bindings.nvrtc")
    from specgraph_cuda import many_rows

    launched: list[int] = []
    monkeypatch.setattr(many_rows, "launch", lambda plan, x, weight, out: launched.append(x.shape[1]))
    own = many_rows.linears(lambda *shape: Plan(2, 128, 7, 4, "PARTS"), lambda kernel, plan, device: "a kernel")
    for depth in (64, 192, 200, 256, 264, 320):
        own.parts(torch.empty(96, depth, dtype=torch.bfloat16), torch.empty(64, depth, dtype=torch.bfloat16))
    assert launched == [256, 320]
