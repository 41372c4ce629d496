"""The life of a graph and its pool, with a vendor whose calls can be made to fail one by one."""

from __future__ import annotations

import gc
import sys
import threading
from contextlib import nullcontext
from itertools import count

import pytest
import torch
from cpu.test_tasks import interrupted

from specgraph.cpu import CpuPlatform
from specgraph.device import Graph, GraphPool, Platform, VendorMessage, trial
from specgraph.device.pool import CaptureLock
from specgraph.errors import CaptureError, HostReadError, PlatformError

FILES = tuple(sys.modules[life.__module__].__file__ for life in (Graph, GraphPool))


class Vendor:
    """The calls that the fake backend got, in order, and which of them raise."""

    def __init__(self):
        self.calls: list[str] = []
        self.fails: dict[str, Exception] = {}

    def call(self, name):
        self.calls.append(name)
        if name in self.fails:
            raise self.fails[name]


class FakePool(GraphPool):
    def _new_handle(self):
        self.platform.vendor.call("new pool")
        return object()

    def _release(self, handle):
        assert self.platform.captures.graph is None
        self.platform.vendor.call("release pool")


class FakeGraph(Graph):
    messages = (*Graph.messages, VendorMessage("code 77", CaptureError, "the vendor's 77th error"))

    def _begin(self, handle):
        assert handle is self.pool_handle
        assert not gc.isenabled()
        self.platform.vendor.call("begin")

    def _end(self):
        assert self.platform.current_stream() is self.platform.capture_stream
        self.platform.vendor.call("end")

    def _abandon(self, began):
        assert self.platform.current_stream() is self.platform.capture_stream
        self.platform.vendor.call(f"abandon {'begun' if began else 'unbegun'}")

    def _launch(self):
        self.platform.vendor.call("launch")

    def _destroy(self):
        self.platform.vendor.call("destroy")


class FakePlatform(CpuPlatform):
    graph_type = FakeGraph
    pool_type = FakePool

    def __init__(self):
        super().__init__()
        self.vendor = Vendor()

    def take(self):
        calls, self.vendor.calls = self.vendor.calls, []
        return calls


@pytest.fixture
def platform():
    return FakePlatform()


def assert_next_capture_works(platform, graph):
    assert platform.captures.graph is None
    assert gc.isenabled()
    assert platform.current_stream().id == 0
    platform.vendor.fails.clear()
    platform.take()
    with graph.capture():
        assert platform.captures.graph is graph
        assert platform.captures.is_here
        assert platform.current_stream() is platform.capture_stream
    graph.replay()
    assert platform.take()[-3:] == ["begin", "end", "launch"]


def test_a_life(platform):
    pool = platform.graph_pool()
    first, second = platform.graph(pool), platform.graph(pool)
    for graph in (first, second):
        with graph.capture():
            pass
    assert first.pool_handle is second.pool_handle
    assert pool.num_graphs == 2
    first.replay()
    first.close()
    first.close()
    assert platform.take() == ["new pool", "begin", "end", "begin", "end", "launch", "destroy"]
    second.reset()
    assert platform.take() == ["destroy", "release pool"]
    with second.capture():  # a released pool is not used again
        pass
    assert platform.take() == ["new pool", "begin", "end"]
    with pytest.raises(CaptureError, match="closed"):
        first.replay()


@pytest.mark.parametrize(
    ("vendor_says", "error", "ours"),
    [
        ("operation not permitted when stream is capturing", HostReadError, "on the host"),
        ("xyzErrorStreamCaptureUnsupported\nmore", HostReadError, "on the host"),
        ("Out of memory: 8 GiB", CaptureError, "Capture smaller sizes"),
        ("out of resources", CaptureError, "capture fewer sizes"),
        ("Code 77", CaptureError, "77th error"),
        ("something else", CaptureError, "something else"),
    ],
)
@pytest.mark.parametrize("call", ["begin", "end"])
def test_the_vendor_s_errors_become_ours(platform, call, vendor_says, error, ours):
    graph = platform.graph()
    platform.vendor.fails[call] = RuntimeError(vendor_says)
    with pytest.raises(error, match=ours) as raised, graph.capture():
        pass
    assert type(raised.value) is error
    assert vendor_says.splitlines()[0] in str(raised.value)
    assert "\n" not in str(raised.value)
    abandoned = "abandon unbegun" if call == "begin" else "abandon begun"
    assert platform.take()[-2:] == [abandoned, "release pool"]
    assert_next_capture_works(platform, graph)


def test_an_exception_of_a_sound_block_passes_through(platform):
    graph = platform.graph()
    with pytest.raises(RuntimeError, match=r"^mine$"), graph.capture():
        raise RuntimeError("mine")
    assert platform.take() == ["new pool", "begin", "end", "destroy", "release pool"]
    assert_next_capture_works(platform, graph)


def test_an_exception_of_a_block_that_broke_the_capture(platform):
    graph = platform.graph()
    platform.vendor.fails["end"] = RuntimeError("invalidated")
    with pytest.raises(CaptureError, match="the capture failed: mine"), graph.capture():
        raise RuntimeError("mine")
    with pytest.raises(KeyError, match="mine"), graph.capture():
        raise KeyError("mine")
    assert platform.take()[-4:] == ["begin", "end", "abandon begun", "release pool"]
    assert_next_capture_works(platform, graph)


@pytest.mark.parametrize("end_fails", [False, True])
@pytest.mark.parametrize("block_fails", [False, True])
def test_a_block_that_leaves_another_stream_current(platform, block_fails, end_fails):
    """The capture is ended on the stream where it began, as after `torch.cuda.set_stream`."""
    graph, other = platform.graph(), platform.stream()
    platform.vendor.fails = {"end": RuntimeError("mine")} if end_fails else {}
    error = pytest.raises(CaptureError if end_fails else RuntimeError, match="mine")
    with error if block_fails or end_fails else nullcontext(), graph.capture():
        platform._thread.stream = other
        if block_fails:
            raise RuntimeError("mine")
    graph.reset()
    assert_next_capture_works(platform, graph)


def test_a_host_read_in_the_block(platform):
    graph = platform.graph()
    with pytest.raises(HostReadError), graph.capture():
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
    assert_next_capture_works(platform, graph)


def test_a_pool_without_room_for_another_handle(platform):
    graph = platform.graph()
    platform.vendor.fails["new pool"] = RuntimeError("no pool")
    with pytest.raises(RuntimeError, match="no pool"), graph.capture():
        pass
    assert_next_capture_works(platform, graph)


def test_a_retired_handle_is_given_to_no_later_capture(platform):
    pool = platform.graph_pool()
    first, second = platform.graph(pool), platform.graph(pool)
    with first.capture():
        pass
    pool.retire(first.pool_handle)
    with second.capture():
        pass
    assert first.pool_handle is not second.pool_handle
    platform.take()
    first.close()
    assert platform.take() == ["destroy", "release pool"]


def test_captures_neither_nest_nor_overlap(platform):
    graph, inner, told = platform.graph(), platform.graph(), []

    def other():
        try:
            with inner.capture():
                pass
        except CaptureError as error:
            told.append(str(error))

    with graph.capture():
        with pytest.raises(CaptureError, match="nested"), inner.capture():
            pass
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        with pytest.raises(CaptureError, match="empty"):
            inner.replay()
    assert "another thread is capturing" in told[0]
    with platform.graph().capture(), pytest.raises(CaptureError, match="inside the capture of another"):
        graph.replay()
    assert_next_capture_works(platform, inner)


class Interrupt:
    """Raises KeyboardInterrupt when a call returns that `Graph` or `GraphPool` makes while a capture begins: there
    Python takes signals."""

    beginning = tuple(f.__code__ for f in (CaptureLock.acquire, GraphPool.enter, Graph.capture.__wrapped__))

    def __init__(self, at):
        self.left = at

    def __enter__(self):
        sys.setprofile(self.returned)

    def __exit__(self, kind, *_):
        sys.setprofile(None)
        return kind is KeyboardInterrupt

    def returned(self, frame, event, argument):
        caller = {"c_return": frame, "return": frame.f_back}.get(event)
        if caller is not None and caller.f_code in self.beginning:
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt


def test_an_interrupt_while_a_capture_begins_leaves_nothing_taken(platform):
    pool, call = platform.graph_pool(), 1
    while True:
        graph, interrupt = platform.graph(pool), Interrupt(call)
        with interrupt, graph.capture():
            pass
        if interrupt.left > 0:
            break
        graph.close()
        assert pool.num_graphs == 0, f"call {call}"
        assert_next_capture_works(platform, platform.graph())
        call += 1
    assert call > 5


@pytest.mark.parametrize("ends", ["closed again", "dropped"])
def test_an_interrupt_at_any_line_of_a_close_leaves_no_share_of_the_pool(platform, ends):
    pool = platform.graph_pool()
    for line in count():
        graph = platform.graph(pool)
        with graph.capture():
            pass
        if not interrupted(graph.close, line, FILES):
            break
        if ends == "closed again":
            graph.close()
        del graph
        assert pool.num_graphs == 0, f"line {line}"
    assert line > 10


def test_a_graph_that_nobody_closed_gives_its_share_back(platform):
    graph = platform.graph()
    with graph.capture():
        pass
    platform.take()
    del graph
    assert platform.take() == ["destroy", "release pool"]


def test_closed_pools_and_platforms(platform):
    pool = platform.graph_pool()
    graph, late = platform.graph(pool), platform.graph(pool)
    with graph.capture():
        pass
    pool.close()
    with pytest.raises(CaptureError, match="pool is closed"), late.capture():
        pass
    platform.close()
    with pytest.raises(PlatformError, match="closed"), late.capture():
        pass
    with pytest.raises(PlatformError, match="closed"):
        platform.graph()
    graph.replay()
    graph.close()
    assert platform.take()[-3:] == ["launch", "destroy", "release pool"]


def test_another_platform_s_pool_is_refused(platform):
    for pool in (FakePlatform().graph_pool(), CpuPlatform().graph_pool(), object()):
        with pytest.raises(PlatformError, match="no pool of"):
            platform.graph(pool)


def test_a_graph_that_lacks_a_primitive_is_not_made(platform, monkeypatch):
    lacking = type("Lacking", (Graph,), {name: vars(FakeGraph)[name] for name in Graph.__abstractmethods__ - {"_end"}})
    monkeypatch.setattr(FakePlatform, "graph_type", lacking)
    with pytest.raises(TypeError, match="_end"):
        platform.graph()


TRIALS = [trial.replays_follow_their_input, trial.graphs_share_a_pool, trial.a_loop_in_one_graph]


@pytest.mark.parametrize("try_it", TRIALS, ids=lambda f: f.__name__)
def test_trials_hold_on_a_sound_platform_and_fail_on_graphs_that_do_nothing(platform, try_it):
    assert trial.claim(CpuPlatform(), try_it, "works").reason == "works"
    found = trial.claim(platform, try_it)
    assert not found
    assert "a trial on this device failed" in found.reason


def test_the_trial_of_float8_sees_copies_that_do_nothing(monkeypatch):
    assert trial.claim(CpuPlatform(), trial.float8_is_copied)
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, source: self.zero_())
    assert "gave [0.0, 0.0, 0.0, 0.0, 0.0]" in trial.claim(CpuPlatform(), trial.float8_is_copied).reason


def test_a_trial_that_raises_is_an_answer():
    def raises(platform: Platform) -> str | None:
        raise RuntimeError("first line\nsecond line")

    assert trial.claim(CpuPlatform(), raises).reason.endswith("RuntimeError: first line")
