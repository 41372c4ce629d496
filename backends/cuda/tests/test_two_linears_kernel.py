"""Two linears in one CUDA kernel: plans fit, it compiles, and on a Hopper GPU it is right whatever else runs there."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specgraph_cuda.many_rows_plan import BLOCKS
from specgraph_cuda.two_linears_plan import Plan, cut, plan_for
from torch import Tensor
from torch.nn import functional

from specgraph.device import Platform
from specgraph.ops import Norm, Weight

SHAPES = [(True, 4096, 4096, 14336), (False, 14336, 4096, 6144), (True, 512, 1024, 1000), (False, 256, 384, 40)]
"""gated, input columns, output columns of the first linear and of the second: two in use, two that are cut unevenly."""
EPS = 0.02


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    gated=st.booleans(), rows=st.integers(1, 32), size=st.sampled_from([384, 2048, 4096]),
    columns=st.sampled_from([40, 3072, 6144, 12288, 14336]),
)  # fmt: skip
def test_a_plan_fits_a_multiprocessor(gated: bool, rows: int, size: int, columns: int) -> None:
    plan = cut(gated, rows, size, columns)
    assert plan.rows >= rows
    assert plan.blocks(size, columns) <= BLOCKS
    assert plan.first * plan.blocks(size, columns) >= size
    assert plan.second * plan.blocks(size, columns) >= columns
    assert plan.memory + 16 <= 227 << 10  # bytes of shared memory that a block may have
    assert plan.stages > plan.ahead
    assert plan.stage_bytes % 1024 == 0  # where the swizzle of a tensor copy begins anew
    assert plan.threads <= 512  # of 128 registers each
    # The sums of the second linear lie where the ring was.
    assert plan.stages * plan.stage_bytes >= 16 * plan.halves * plan.rows * (plan.second + 4)


def test_only_what_was_measured_takes_the_kernel() -> None:
    assert plan_for(True, 16, 4096, 4096, 14336) == Plan(16, 32, 112, 2)
    assert plan_for(True, 17, 4096, 4096, 14336) == Plan(32, 32, 112, 2)
    assert plan_for(False, 8, 14336, 4096, 6144) == Plan(8, 32, 48, 1, 2, 2)
    for rows, gated, depth, columns in (
        (33, True, 4096, 14336), (17, True, 4096, 12288), (9, False, 14336, 6144), (1, False, 8192, 6144),
        (0, True, 4096, 14336), (1, True, 4096, 14344),
    ):  # fmt: skip
        assert plan_for(gated, rows, depth, 4096, columns) is None


@pytest.mark.parametrize("rows", [1, 16, 32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_compiles(shape: tuple[bool, int, int, int], rows: int) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    from specgraph_cuda import hopper, two_linears

    if (reason := hopper.why_not()) is not None:
        pytest.skip(reason)
    gated, _, size, columns = shape
    assert hopper.compiled(two_linears.source(cut(gated, rows, size, columns)), "two_linears.cu")


@pytest.fixture
def hopper(platform: Platform) -> Platform:
    if torch.cuda.get_device_capability(platform.device) != (9, 0):
        pytest.skip("the kernel is for compute capability 9.0")
    torch.manual_seed(0)
    return platform


class Problem:
    """Random tensors of one shape, and what they give in float64."""

    def __init__(self, shape: tuple[bool, int, int, int], rows: int) -> None:
        self.gated, depth, self.size, self.columns = shape
        second = self.columns * (2 if self.gated else 1)
        # Rows of very different magnitude: each is divided by its own root mean square.
        magnitude = torch.tensor([0.1, 1.0, 30.0], device="cuda").repeat(rows)[:rows, None]
        self.x = (self.random(rows, depth + 64) * magnitude).bfloat16()[:, :depth]
        self.residual = (self.random(rows, self.size + 8) * magnitude).bfloat16()[:, : self.size]
        self.weight = (self.random(self.size, depth) * depth**-0.5).bfloat16()
        self.norm = self.random(self.size).bfloat16()
        self.following = (self.random(second, self.size) * self.size**-0.5).bfloat16()

    @staticmethod
    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda")

    def __call__(self, late: int = 0) -> tuple[Tensor, Tensor]:
        """The kernel's results; the first `late` blocks begin when the others no longer wait for them."""
        from dataclasses import replace

        from specgraph_cuda.two_linears import two_linears_in_one

        run = two_linears_in_one(
            lambda gated, rows, depth, size, columns: replace(cut(gated, rows, size, columns), late=late)
        )
        both = run(self.x, self.weight, self.residual, self.norm, EPS, self.following, self.gated)
        assert both is not None
        return both

    def expected(self) -> tuple[Tensor, Tensor]:
        total = self.x.double() @ self.weight.double().T + self.residual.double()
        normed = total * (total.square().mean(1, keepdim=True) + EPS).rsqrt() * self.norm.double()
        product = normed @ self.following.double().T
        if not self.gated:
            return total, product
        gate, up = product.chunk(2, 1)
        return total, functional.silu(gate) * up


def same(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("rows", [1, 3, 8, 9, 16, 17, 27, 32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_right(hopper: Platform, shape: tuple[bool, int, int, int], rows: int) -> None:
    problem = Problem(shape, rows)
    total, product = problem()
    wide, expected = problem.expected()
    for got, want, most in ((total, wide, 3e-3), (product, expected, 8e-3)):
        for row in range(rows):
            assert float((got[row].double() - want[row]).norm() / want[row].norm()) < most  # NaN fails too
    assert all(same(problem(), (total, product)) for _ in range(5))


@pytest.mark.parametrize("late", [1, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_that_do_not_run_are_replaced(hopper: Platform, shape: tuple[bool, int, int, int], late: int) -> None:
    for rows in (2, 16, 19, 32):
        problem = Problem(shape, rows)
        assert same(problem(), problem(late))


def test_graphs_that_run_at_once_do_not_wait_for_each_other_for_ever(hopper: Platform) -> None:
    """Each takes some of the multiprocessors, and none has all that its blocks need."""
    problems = [Problem(shape, 6) for shape in SHAPES[:2]]
    expected = [problem() for problem in problems]
    torch.cuda.synchronize()
    graphs, streams = list[torch.cuda.CUDAGraph](), [torch.cuda.Stream() for _ in range(3)]
    found: list[tuple[Tensor, Tensor]] = []
    from specgraph_cuda.two_linears import two_linears_in_one

    run = two_linears_in_one()
    for stream in streams:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            for p in problems:  # outside of captures there is memory to be made
                run(p.x, p.weight, p.residual, p.norm, EPS, p.following, p.gated)
        with torch.cuda.graph(graph, stream=stream):
            for p in problems * 8:
                both = run(p.x, p.weight, p.residual, p.norm, EPS, p.following, p.gated)
                assert both is not None
                found.append(both)
        graphs.append(graph)
    for _ in range(10):
        for both in found:
            for tensor in both:
                tensor.fill_(float("nan"))
        torch.cuda.synchronize()
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
                graph.replay()
        torch.cuda.synchronize()
        assert all(same(both, expected[i % 2]) for i, both in enumerate(found))


def test_the_device_s_kernel_is_asked_first_and_not_for_biases() -> None:
    pytest.importorskip("triton")
    from launched import Launched

    from specgraph.kernels.launch import LaunchOptions

    asked: list[bool] = []

    def own(x: Tensor, weight: Tensor, residual: Tensor, norm: Tensor, eps: float, following: Tensor, gated: bool):
        asked.append(gated)
        return None if len(asked) > 2 else (residual, x)

    ops = Launched(LaunchOptions(two_linears=own))
    x, weight, norm = torch.randn(2, 8, dtype=torch.float64), torch.randn(8, 8).double(), torch.ones(8).double()
    for op in (ops.linear_norm_linear, ops.linear_norm_gate_up):
        total, out = op(x, Weight(weight), x, Norm(norm, EPS), Weight(weight))
        assert total is x
        assert out is x
    assert asked == [False, True]


def test_captured_launches_have_progress_memory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    from types import SimpleNamespace

    from specgraph_cuda.two_linears import ProgressMemory

    now = SimpleNamespace(stream=1, capturing=True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=now.stream))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now.capturing)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    memory, device = ProgressMemory(), torch.device("cpu")
    assert memory.take(device) is None  # none can be made in a capture
    taken = list[Tensor | None]()
    for now.stream, now.capturing in ((1, False), (1, False), (2, False), (1, True), (1, True)):
        taken.append(memory.take(device))
    addresses = [entry.data_ptr() for entry in taken if entry is not None]
    assert addresses[0] == addresses[1]
    assert len(addresses) == 5
    assert len(set(addresses)) == 4
    now.stream, now.capturing = 0, False  # of every default stream
    first, second = memory.take(device), memory.take(torch.device("meta"))
    assert first is not None
    assert second is not None
    assert (first.device, second.device) == (device, torch.device("meta"))
