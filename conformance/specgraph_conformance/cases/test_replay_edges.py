"""Edge cases of replays: inputs of one value, special values, long graphs and waits, and graphs closed meanwhile."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from specgraph.device import Discovered, Event, Graph, Platform, Stream
from torch import Tensor

from specgraph_conformance.case import case
from specgraph_conformance.rig import (
    LONG_ADDITIONS,
    LONG_SIZE,
    captured,
    expect_equal,
    long_work,
    on_host,
    replay_and_wait,
    with_numbers,
)


@case(
    "replay.inputs-of-one-value-are-read",
    "A replay reads tensors of one element as they are now: a number, an index, a condition and a factor without "
    "dimensions.",
    hazard="small-inputs-baked",
    cause="small tensors are passed to the captured kernels by value",
    quick=True,
)
def test_one_value(platform: Platform) -> None:
    device = platform.device
    rows = torch.arange(40.0, device=device).view(8, 5)
    index = torch.zeros(1, dtype=torch.int64, device=device)
    number, factor = torch.zeros(1, device=device), torch.ones((), device=device)
    is_negative = torch.zeros(1, dtype=torch.bool, device=device)
    out = torch.zeros(1, 5, device=device)

    def body() -> None:
        row = rows.index_select(0, index) * factor + number
        out.copy_(torch.where(is_negative, -row, row))

    graph = captured(platform, body)
    for i, n, f, negative in ((3, 0.5, 2.0, False), (7, -4.0, 0.25, True), (0, 8.0, -1.0, False)):
        index.fill_(i)
        number.fill_(n)
        factor.fill_(f)
        is_negative.fill_(negative)
        replay_and_wait(platform, graph)
        row = torch.arange(40.0).view(8, 5)[i : i + 1] * f + n
        expect_equal(
            on_host(out), -row if negative else row, "a row chosen, scaled and shifted by tensors of one value"
        )


@case(
    "replay.integers-of-64-bits",
    "A replay computes int64 values and takes Python integers above 32 bits as they are.",
    hazard="integers-in-32-bits",
    cause="integers of captured ops, or their results, are kept in 32 bits",
    quick=True,
)
def test_wide_integers(platform: Platform) -> None:
    x = torch.zeros(63, dtype=torch.int64, device=platform.device)  # odd, and so are the bytes of `far`
    out, far = torch.zeros_like(x), torch.zeros(63, dtype=torch.bool, device=platform.device)
    rows = torch.arange(70_000, device=platform.device)
    looked_up = torch.zeros_like(x)

    def body() -> None:
        out.copy_((x + (3 << 40)) * 5 - (1 << 33))
        far.copy_(x == (1 << 36) + 42)
        looked_up.copy_(rows[x & 0xFFFF | 1 << 15])

    graph = captured(platform, body)
    for start in (0, (1 << 36) - 20, -(1 << 45)):
        x.copy_(torch.arange(start, start + 63))
        replay_and_wait(platform, graph)
        values = range(start, start + 63)
        wanted = torch.tensor([(value + (3 << 40)) * 5 - (1 << 33) for value in values])
        expect_equal(on_host(out), wanted, "sums and products of int64")
        expect_equal(on_host(far), torch.tensor([value == (1 << 36) + 42 for value in values]), "comparisons of int64")
        wanted = torch.tensor([value & 0xFFFF | 1 << 15 for value in values])
        expect_equal(on_host(looked_up), wanted, "rows at indices above 32,767")


@case(
    "replay.another-platform-closes",
    "Two Platform objects of one device capture and replay side by side, and after one was closed the graph of the "
    "other still replays.",
    hazard="close-ends-other-platforms",
    cause="state of the module instead of the platform, or close() resets the device, or destroys graphs, streams or "
    "pools that are not its own",
    quick=True,
)
def test_other_closes(backend: Discovered, platform: Platform) -> None:
    assert backend.backend is not None
    x, out = torch.ones(256, device=platform.device), torch.zeros(256, device=platform.device)
    graph = captured(platform, lambda: out.copy_(x * 3 + 1))
    other = backend.backend.open(0)
    y = torch.zeros(4, device=other.device)
    theirs = captured(other, lambda: y.add_(2), warm_up=False)
    for value in (1.0, 2.0, 3.0, 4.0):
        x.fill_(value)
        if value < 3:
            theirs.replay()
        replay_and_wait(platform, graph)
        assert on_host(out).unique().tolist() == [3 * value + 1]
        if value == 2:
            other.synchronize()
            assert on_host(y).unique().tolist() == [4.0]
            theirs.close()
            other.close()


@case(
    "capture.leaves-the-generator",
    "A capture without random numbers, and its replays, leave the default generator of the device as it was.",
    hazard="capture-moves-the-generator",
    cause="the generator is advanced, or put back to an earlier state, at the end of a capture or with each replay",
    quick=True,
)
def test_generator(platform: Platform) -> None:
    x = torch.zeros(64, device=platform.device)

    def draws(between: bool) -> Tensor:
        torch.manual_seed(23)
        first = torch.rand(64, device=platform.device)
        if between:
            graph = captured(platform, lambda: x.add_(1))
            replay_and_wait(platform, graph)
            graph.close()
        return on_host(torch.stack([first, torch.rand(64, device=platform.device)]))

    expect_equal(draws(True), draws(False), "random numbers drawn before and after a capture")


@case(
    "replay.special-values-pass",
    "Infinities and NaN pass through replayed ops as through eager ones.",
    hazard="special-values-lost",
    cause="results are clamped to finite values, or NaN becomes 0",
    quick=True,
)
def test_special(platform: Platform) -> None:
    inf, nan = float("inf"), float("nan")
    x = torch.zeros(6, device=platform.device)
    sums, largest, chosen = (torch.zeros(6, device=platform.device) for _ in range(3))

    def body() -> None:
        sums.copy_(x + 1)
        largest.copy_(torch.maximum(x, torch.zeros_like(x)))
        chosen.copy_(torch.where(x == x, x.neg(), x * 2))

    graph = captured(platform, body)
    values = torch.tensor([1.0, inf, -inf, nan, 3e38, 0.0])
    x.copy_(values)
    replay_and_wait(platform, graph)
    zero = torch.zeros(6)
    wanted = values + 1, torch.maximum(values, zero), torch.where(values == values, values.neg(), values * 2)
    for name, out, right in zip(("x + 1", "maximum(x, 0)", "where"), (sums, largest, chosen), wanted, strict=True):
        seen = on_host(out)
        is_same = torch.where(right.isnan(), seen.isnan(), seen == right)
        assert is_same.all(), f"{name} of {values.tolist()} is {seen.tolist()} instead of {right.tolist()}"


def replays_beside_others(
    platform: Platform, graph: Graph, x: Tensor, out: Tensor, wanted: Callable[[float], float]
) -> None:
    """Fill x, and check that replays fill `out` with `wanted` of that value and write into no newer tensor."""
    others = [torch.full_like(x, 7.0) for _ in range(8)]
    for value in (3.0, 5.0):
        x.fill_(value)
        replay_and_wait(platform, graph)
        assert on_host(out).unique().tolist() == [wanted(value)]
        assert all(on_host(other).unique().tolist() == [7.0] for other in others), "a replay wrote into an eager tensor"


@case(
    "replay.scratch-is-not-given-away",
    "Memory that a capture allocated and dropped is not handed to eager tensors while its graph lives.",
    hazard="scratch-given-away",
    cause="a tensor made in a capture comes from the ordinary allocator, or the pool gives freed blocks back too early",
)
def test_scratch(platform: Platform) -> None:
    x, out = torch.ones(1 << 16, device=platform.device), torch.zeros(1 << 16, device=platform.device)

    def body() -> None:
        scratch = torch.empty_like(x)
        scratch.copy_(x)
        out.copy_(scratch * 2)

    graph = captured(platform, body, warm_up=False)
    replays_beside_others(platform, graph, x, out, lambda value: 2 * value)


@case(
    "replay.closing-one-graph-leaves-others",
    "After close() of one graph, a graph with a pool of its own replays right and writes no other tensor.",
    hazard="close-frees-other-graphs",
    cause="close() gives the memory of all captures back, not of this one",
)
def test_closing_leaves(platform: Platform) -> None:
    x, out = torch.ones(1 << 16, device=platform.device), torch.zeros(1 << 16, device=platform.device)
    first = captured(platform, lambda: out.copy_((x * 5).exp() + 1))
    second = captured(platform, lambda: out.copy_((x * 2 + 1) * 3))
    first.close()
    replays_beside_others(platform, second, x, out, lambda value: (2 * value + 1) * 3)


Waits = Callable[[Platform, Stream, Event, Stream], object]
WAITS: dict[str, Waits] = {
    # (platform, the stream that works, an event recorded after the work, the stream that reads)
    "event.wait": lambda platform, works, event, reads: event.wait(reads),
    "wait_event": lambda platform, works, event, reads: reads.wait_event(event),
    "wait_stream": lambda platform, works, event, reads: reads.wait_stream(works),
    "event.synchronize": lambda platform, works, event, reads: event.synchronize(),
    "stream.synchronize": lambda platform, works, event, reads: works.synchronize(),
    "platform.synchronize": lambda platform, works, event, reads: platform.synchronize(),
}


@pytest.mark.parametrize("way", WAITS)
@case(
    "streams.long-work-is-waited-for",
    "Each way to wait for a replay on a side stream waits until all of it is done.",
    hazard="wait-returns-early",
    cause="the wait orders nothing, names another stream, or asks for the current stream only; or the replay was "
    "launched on another stream",
)
def test_long_work(platform: Platform, way: str) -> None:
    x, seen = torch.zeros(LONG_SIZE, device=platform.device), torch.zeros(LONG_SIZE, device=platform.device)
    works, reads = platform.stream(), platform.stream()
    graph = captured(platform, lambda: long_work(x), warm_up=False)
    for number in (1, 2):
        with platform.use(works):
            graph.replay()
            event = platform.event()
            event.record()
        WAITS[way](platform, works, event, reads)
        with platform.use(reads):
            seen.copy_(x)
        reads.synchronize()
        works.synchronize()
        platform.synchronize()
        values, wanted = on_host(seen).unique().tolist(), LONG_ADDITIONS * number
        assert values == [wanted], f"after {way} another stream saw {values} where {wanted} was to be seen"


@case(
    "replay.five-thousand-ops",
    "A graph of 5,000 ops, each of which needs the one before it, runs all of them in order.",
    hazard="graph-cut-off",
    cause="the runtime holds fewer nodes in a graph and drops the rest without an error, or loses what orders them",
)
def test_many_ops(platform: Platform) -> None:
    x, wanted = torch.arange(4, device=platform.device), torch.arange(4)
    graph = captured(platform, lambda: with_numbers(x, 2_500), warm_up=False)
    for number in (1, 2):
        replay_and_wait(platform, graph)
        with_numbers(wanted, 2_500)
        expect_equal(on_host(x), wanted, f"int64 after replay {number}")


@case(
    "replay.closed-while-it-runs",
    "What a replay writes is right, also where its graph is closed, and other memory allocated, before it is done.",
    hazard="closed-under-a-replay",
    cause="close() frees the memory of a graph, or the graph itself, without regard to a replay that still runs",
)
def test_closed_running(platform: Platform) -> None:
    x, out = torch.ones(LONG_SIZE, device=platform.device), torch.zeros(LONG_SIZE, device=platform.device)

    def body() -> None:
        y = x * 2
        for _ in range(LONG_ADDITIONS):
            y = y + 1
        out.copy_(y)

    for number in (1.0, 2.0):
        graph = captured(platform, body, warm_up=False)
        x.fill_(number)
        graph.replay()
        graph.close()
        del graph
        gc.collect()
        others = [torch.full((LONG_SIZE,), -1.0, device=platform.device) for _ in range(4)]
        platform.synchronize()
        assert on_host(out).unique().tolist() == [2 * number + LONG_ADDITIONS]
        assert all(on_host(other).unique().tolist() == [-1.0] for other in others)
