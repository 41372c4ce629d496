"""The graph runner on the `cpu` platform."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from specgraph.attention import HostLengths
from specgraph.capture import BatchDescriptor, GraphRunner, Recording
from specgraph.cpu.graph import CpuGraph
from specgraph.cpu.platform import CpuPlatform
from specgraph.cpu.pool import CpuGraphPool
from specgraph.device import Capabilities
from specgraph.errors import CaptureError, HostReadError, ReadSetError, StaleInputError


def descriptor(size: int) -> BatchDescriptor:
    return BatchDescriptor("propose", size, 4, 3)


@dataclass
class Model:
    """x @ w + bias into `out`, for the first `size` rows."""

    named: dict[str, Tensor]

    def body(self, size: int) -> Callable[[Recording | None], None]:
        x, out, w = self.named["x"][:size], self.named["out"][:size], self.named["w"]

        def run(recording: Recording | None) -> None:
            out.copy_(torch.tanh(x @ w) + x)

        return run

    def eager(self, size: int) -> Tensor:
        x = self.named["x"][:size]
        return torch.tanh(x @ self.named["w"]) + x


@pytest.fixture
def model() -> Model:
    g = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=g) for shape in ((8, 6), (6, 6))]
    return Model({"x": tensors[0], "w": tensors[1], "out": torch.zeros(8, 6)})


@pytest.fixture
def runner(platform, model) -> Iterator[GraphRunner]:
    runner = GraphRunner(platform, lambda: model.named)
    yield runner
    runner.close()


def assert_replays(runner: GraphRunner, model: Model, size: int) -> None:
    model.named["x"].add_(0.25)
    model.named["out"].fill_(-9)
    assert runner.replay(descriptor(size)) == 1
    assert torch.equal(model.named["out"][:size], model.eager(size))
    assert (model.named["out"][size:] == -9).all()


def test_replays_give_what_eager_gives_in_any_order(runner, model):
    for size in (8, 4, 1):
        runner.capture(descriptor(size), model.body(size))
    assert runner.descriptors == [descriptor(8), descriptor(4), descriptor(1)]
    assert runner.graph_count == 3
    for size in (1, 8, 4, 4, 8, 1):
        assert_replays(runner, model, size)


def test_the_body_is_run_once_for_warm_up_and_captured_once(runner, model):
    calls: list[bool] = []
    run = model.body(2)

    def body(recording: Recording | None) -> None:
        calls.append(recording is None)
        run(recording)

    runner.capture(descriptor(2), body)
    assert calls == [True, False]
    for _ in range(3):
        assert_replays(runner, model, 2)
    assert calls == [True, False]


def test_a_batch_that_was_never_captured_is_refused_not_captured_at_request_time(runner, model):
    with pytest.raises(CaptureError, match=r"no other batch was: call capture\(\) first"):
        runner.replay(descriptor(4))
    runner.capture(descriptor(4), model.body(4))
    with pytest.raises(CaptureError, match=r"propose\[2 x 4, K=3\] was never captured; captured are: propose\[4 x 4"):
        runner.replay(descriptor(2))
    with pytest.raises(CaptureError, match="never captured"):
        runner.replay(replace(descriptor(4), num_speculative_tokens=5))
    assert descriptor(2) not in runner


def test_capturing_twice_is_refused_and_the_first_stays(runner, model):
    runner.capture(descriptor(4), model.body(4))
    with pytest.raises(CaptureError, match="captured already"):
        runner.capture(descriptor(4), model.body(2))
    assert_replays(runner, model, 4)


class Broken(Exception):
    pass


def raises(recording: Recording | None, model: Model) -> None:
    model.named["out"].zero_()
    if recording is not None:
        raise Broken("in the middle of a capture")


def reads_the_host(recording: Recording | None, model: Model) -> None:
    if float(model.named["x"].sum().item()) > 1e9:
        model.named["out"].zero_()


def branches_on_a_value(recording: Recording | None, model: Model) -> None:
    model.named["out"].zero_()
    if bool((model.named["x"] > 1e9).any()):
        model.named["out"].fill_(1)


STRAY = torch.ones(6)


def touches_a_stray(recording: Recording | None, model: Model) -> None:
    model.named["out"].add_(STRAY)


def fails_after_a_split(recording: Recording | None, model: Model) -> None:
    model.named["out"].zero_()
    if recording is not None:
        recording.split(lambda lengths: None)
        model.named["out"].add_(1)
        raise Broken("in the second segment")


def fails_in_warm_up(recording: Recording | None, model: Model) -> None:
    model.named["out"].zero_()
    raise Broken("already in the warm-up")


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (raises, Broken),
        (reads_the_host, HostReadError),
        (branches_on_a_value, HostReadError),
        (touches_a_stray, ReadSetError),
        (fails_after_a_split, Broken),
        (fails_in_warm_up, Broken),
    ],
)
def test_a_failed_capture_leaves_everything_usable(platform, runner, model, body, error):
    runner.capture(descriptor(8), model.body(8))
    before = platform.memory()
    with pytest.raises(error):
        runner.capture(descriptor(4), lambda recording: body(recording, model))
    assert not platform.is_capturing()
    assert descriptor(4) not in runner
    assert runner.graph_count == 1
    gc.collect()  # the error's frames hold tensors of the capture, in a cycle
    assert platform.memory().allocated == before.allocated
    assert_replays(runner, model, 8)
    runner.capture(descriptor(4), model.body(4))
    assert_replays(runner, model, 4)
    assert_replays(runner, model, 8)


class Watched(CpuPlatform):
    """Remembers what it made."""

    def __init__(self) -> None:
        super().__init__()
        self.graphs: list[CpuGraph] = []
        self.pools: list[CpuGraphPool] = []

    def graph(self, pool=None) -> CpuGraph:
        self.graphs.append(super().graph(pool))
        return self.graphs[-1]

    def graph_pool(self) -> CpuGraphPool:
        self.pools.append(super().graph_pool())
        return self.pools[-1]


@pytest.mark.parametrize("body", [raises, touches_a_stray, fails_after_a_split])
def test_the_pieces_of_a_failed_capture_are_closed_and_the_pool_with_the_runner(model, body):
    platform = Watched()
    runner = GraphRunner(platform, lambda: model.named)
    runner.capture(descriptor(8), model.body(8))
    with pytest.raises((Broken, ReadSetError)):
        runner.capture(descriptor(4), lambda recording: body(recording, model))
    good, *failed = platform.graphs
    assert failed
    assert all(graph.is_closed for graph in failed)
    assert not good.is_closed
    assert len(platform.pools) == 1  # all graphs of a runner share one
    assert {id(graph.pool) for graph in platform.graphs} == {id(platform.pools[0])}
    runner.close()
    assert good.is_closed
    assert platform.pools[0].is_closed


def test_checked_inputs_name_what_was_reassigned(platform, model):
    runner = GraphRunner(platform, lambda: model.named, check_inputs=True)
    runner.capture(descriptor(4), model.body(4))
    assert_replays(runner, model, 4)
    assert runner.plain_graph(descriptor(4)) is None  # whose replay, by itself, would check nothing
    old, model.named["w"] = model.named["w"], model.named["w"].clone()
    with pytest.raises(StaleInputError, match=r"propose\[4 x 4, K=3\]: 'w' was reassigned"):
        runner.replay(descriptor(4))
    model.named["w"] = old
    assert_replays(runner, model, 4)


class Budgeted(CpuPlatform):
    """Holds few graphs."""

    limit = 2

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, max_live_graphs=self.limit)


@pytest.mark.hazard("exec-budget")
def test_more_graphs_than_the_platform_holds_are_refused_early(model):
    runner = GraphRunner(Budgeted(), lambda: model.named)
    for size in (8, 4):
        runner.capture(descriptor(size), model.body(size))
    with pytest.raises(CaptureError, match=r"'cpu' holds at most 2 graphs .* fewer capture sizes"):
        runner.capture(descriptor(2), model.body(2))
    assert_replays(runner, model, 4)
    assert_replays(runner, model, 8)


def test_the_pieces_of_one_capture_count_too(model):
    runner = GraphRunner(Budgeted(), lambda: model.named)

    def body(recording: Recording | None) -> None:
        for _ in range(3):
            model.named["out"].add_(1)
            if recording is not None:
                recording.split(lambda lengths: None)

    with pytest.raises(CaptureError, match="holds at most 2 graphs"):
        runner.capture(descriptor(4), body)
    assert runner.graph_count == 0
    runner.capture(descriptor(4), model.body(4))
    assert_replays(runner, model, 4)


def test_pieces_run_in_order_and_pass_tensors_on(runner, model):
    """x -> (graph: h = x @ w) -> (eager: g = h + |x|, host code) -> (graph: out = tanh(g) + h)."""
    x, w, out = model.named["x"][:4], model.named["w"], model.named["out"][:4]
    seen: list[dict] = []

    def body(recording: Recording | None) -> None:
        h = x @ w
        g = torch.empty_like(h)

        def piece(lengths) -> None:
            seen.append(dict(lengths))
            g.copy_(h + float(x.abs().sum()))  # reads the host: fine outside of the graphs

        if recording is None:
            piece({})
        else:
            recording.split(piece)
        out.copy_(torch.tanh(g * 0.01) + h)

    runner.capture(descriptor(4), body)
    assert runner.graph_count == 2
    seen.clear()
    for step in range(3):
        x.add_(0.5)
        assert runner.replay(descriptor(4), {0: HostLengths([1], [step])}) == 2
        h = x @ w
        assert torch.equal(out, torch.tanh((h + float(x.abs().sum())) * 0.01) + h)
    assert seen == [{0: HostLengths([1], [step])} for step in range(3)]


def test_closing_gives_the_memory_back(platform, model):
    before = platform.memory().reserved
    runner = GraphRunner(platform, lambda: model.named)
    for size in (8, 4):
        runner.capture(descriptor(size), model.body(size))
    assert platform.memory().reserved > before
    runner.close()
    assert platform.memory().reserved == before
    assert runner.graph_count == 0
    with pytest.raises(CaptureError):
        runner.replay(descriptor(8))
    runner.close()
