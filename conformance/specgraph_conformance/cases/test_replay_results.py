"""Results of replays: tensors of any size, views of dropped tensors, tensors that outlive their graph, and errors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from specgraph.device import Platform
from torch import Tensor

from specgraph_conformance.case import case
from specgraph_conformance.rig import assert_usable, captured, expect_equal, on_host, replay_and_wait

SIZES = (63, 4_097, 5_003, 65_599)
"""Numbers of values around the limits of blocks and grids. None is a multiple of a power of two."""
ROWS, COLUMNS = 96, 128
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "a part": lambda x: x[17:],
    "a view of a view": lambda x: x.view(-1, 8)[1:, ::2],
    "a transposed tensor": lambda x: x.t(),
    "an expanded row": lambda x: x[5].expand(4, -1),
    "one of several parts": lambda x: x.chunk(3, 1)[2],
    "a detached part": lambda x: x.detach()[1:],
    "its bytes": lambda x: x.view(torch.uint8)[2:],
}


class _Failing:
    """Switches the errors of the op `fails_on_demand`."""

    now = False


def _copy_or_fail(x: Tensor, out: Tensor) -> None:
    """Copy `x` to `out`, or fail."""
    if _Failing.now:
        raise ZeroDivisionError("the op failed on demand")
    out.copy_(x)


def _nothing(x: Tensor, out: Tensor) -> None:
    """Give shapes: the op returns nothing."""


LIBRARY = torch.library.Library("specgraph_conformance", "DEF")
LIBRARY.define("fails_on_demand(Tensor x, Tensor(a!) out) -> ()")
LIBRARY.impl("fails_on_demand", _copy_or_fail, "CompositeExplicitAutograd")
torch.library.register_fake("specgraph_conformance::fails_on_demand", _nothing, lib=LIBRARY)
fails_on_demand: Callable[[Tensor, Tensor], None] = torch.ops.specgraph_conformance.fails_on_demand.default


@case(
    "replay.results-of-any-size",
    "Results of replayed ops have every value, also when their number is odd or above 4,096.",
    hazard="large-results-cut",
    cause="results are copied in blocks of a fixed size, and the rest of the last block is left out",
    quick=True,
)
def test_sizes(platform: Platform) -> None:
    inputs = [torch.zeros(size, device=platform.device) for size in SIZES]
    outs = [torch.zeros_like(x) for x in inputs]

    def body() -> None:
        for x, out in zip(inputs, outs, strict=True):
            out.copy_((x * 2 + 1).abs())

    graph = captured(platform, body)
    for start in (-3.0, 5000.0):
        for x in inputs:
            x.copy_(torch.arange(float(x.numel())) + start)
        replay_and_wait(platform, graph)
        for x, out in zip(inputs, outs, strict=True):
            expect_equal(on_host(out), (on_host(x) * 2 + 1).abs(), f"the result of {x.numel()} values")


@pytest.mark.parametrize("mode", ["no-grad", "inference-mode"])
@case(
    "replay.views-keep-their-memory",
    "A view whose base was dropped in the capture has the base's values in each replay, whatever the capture allocates "
    "after the drop.",
    hazard="base-freed-under-a-view",
    cause="a memory planner that ends a block's life with the tensor it was made for, not with the last view of it",
    quick=True,
)
def test_views(platform: Platform, mode: str) -> None:
    x = torch.zeros(ROWS, COLUMNS, device=platform.device)
    views = [of(x) for of in VIEWS.values()]
    outs = [torch.zeros(view.shape, dtype=view.dtype, device=platform.device) for view in views]

    def made(of: Callable[[Tensor], Tensor], number: int) -> Tensor:
        return of(x * (number + 2))  # only the view leaves this function

    def body() -> None:
        with torch.inference_mode() if mode == "inference-mode" else nullcontext():
            for number, (of, out) in enumerate(zip(VIEWS.values(), outs, strict=True)):
                view = made(of, number)
                others = [x - factor for factor in (3, 5)]  # of the base's size
                out.copy_(view)
                del others

    graph = captured(platform, body)
    for start in (1.0, 900.0):
        x.copy_(torch.arange(float(ROWS * COLUMNS)).view(ROWS, COLUMNS) + start)
        replay_and_wait(platform, graph)
        for number, ((name, of), out) in enumerate(zip(VIEWS.items(), outs, strict=True)):
            expect_equal(on_host(out), of(on_host(x) * (number + 2)), f"{name} of a dropped tensor")


@case(
    "replay.results-outlive-their-graph",
    "A tensor that a capture made, and a view of one, keep the values of the last replay after their graph and its "
    "pool were closed, whatever is captured and allocated then.",
    hazard="results-freed-with-their-graph",
    cause="close() gives memory back in which a tensor still lives: it must wait for the tensor",
)
def test_outlive(platform: Platform) -> None:
    x = torch.zeros(1 << 16, device=platform.device)
    kept: list[Tensor] = []

    def body() -> None:
        kept[:] = [x * 3, (x * 5)[64:]]

    graph = captured(platform, body, warm_up=False)
    x.copy_(torch.arange(float(x.numel())))
    replay_and_wait(platform, graph)
    graph.close()
    other = captured(platform, lambda: (x - 7).exp())
    others = [torch.full_like(x, -1.0) for _ in range(8)]
    replay_and_wait(platform, other)
    expect_equal(on_host(kept[0]), on_host(x) * 3, "a tensor of a closed graph")
    expect_equal(on_host(kept[1]), (on_host(x) * 5)[64:], "a view of a tensor of a closed graph")
    assert len(others) == 8
    other.close()


@case(
    "replay.errors-come-out",
    "If an op of a graph fails in a replay, its error comes out of replay() or of the next wait, and the platform "
    "stays usable. On a device whose replays call no Python, no op can fail here, and all replays are right.",
    hazard="launch-errors-swallowed",
    cause="the thread that drives launches drops their errors, so that a replay which stopped half-way looks done",
    quick=True,
)
def test_errors(platform: Platform) -> None:
    x, y, out = (torch.zeros(64, device=platform.device) for _ in range(3))

    def body() -> None:
        fails_on_demand(x, y)
        out.copy_(y * 2)

    graph = captured(platform, body)
    x.fill_(3)
    replay_and_wait(platform, graph)
    assert on_host(out).unique().tolist() == [6.0]
    x.fill_(4)
    failed = False
    _Failing.now = True
    try:
        replay_and_wait(platform, graph)
    except Exception:  # the vendor's own error is as good
        failed = True
    finally:
        _Failing.now = False
    seen = on_host(out).unique().tolist()
    assert failed or seen == [8.0], f"an op failed in a replay, nobody was told, and the result is {seen}"
    graph.close()
    assert_usable(platform)
