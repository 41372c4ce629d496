"""The Graph contract, and what torch_musa 2.7.1 leaves broken after a failed capture."""

from __future__ import annotations

import gc

import pytest
import torch
from device_memory import reserved
from specgraph.errors import CaptureError

from specgraph_musa.graph import end_recording
from specgraph_musa.platform import MusaPlatform
from specgraph_musa.policy import Policy
from torch_musa import simulated
from torch_musa.graphs import Generator


def works(platform) -> bool:
    """Return whether a new graph captures, and replays correctly on new input."""
    x = torch.ones(4, device=platform.device)
    graph = platform.graph()
    with graph.capture():
        y = x * 3
    x.fill_(5)
    graph.replay()
    platform.synchronize()
    answer = y.tolist()
    graph.close()
    return answer == [15.0] * 4


@pytest.mark.parametrize("shared", [False, True], ids=["own-pool", "shared-pool"])
@pytest.mark.parametrize("swallowed", [False, True])
def test_a_host_read_fails_the_capture_and_nothing_else(musa, shared, swallowed):
    pool = musa.graph_pool() if shared else None
    other = musa.graph(pool)
    x = torch.ones(3, device=musa.device)
    with other.capture():
        kept = x + 1
    graph = musa.graph(pool)
    before = musa.current_stream()
    with pytest.raises(CaptureError), graph.capture():
        y = torch.ones(3, device=musa.device) + 1
        try:
            y.sum().item()
        except Exception:
            if not swallowed:
                raise
    assert musa.current_stream() == before
    assert not musa.is_capturing()
    with graph.capture():
        y = x * 7
    other.replay()
    graph.replay()
    assert kept.tolist() == [2.0] * 3
    assert y.tolist() == [7.0] * 3
    torch.rand(2, device=musa.device)
    for each in (graph, other):
        each.close()
    assert works(musa)


def test_without_the_clean_up_the_next_capture_fails(musa, monkeypatch):
    """capture-left-broken, put back: the allocator still records to the pool."""
    monkeypatch.setattr("specgraph_musa.graph.end_recording", lambda index, handle: False)
    monkeypatch.setattr("specgraph_musa.graph.heal_generator", lambda platform: None)
    monkeypatch.setattr("specgraph_musa.graph.MusaGraphPool.retire", lambda pool, handle: None)
    pool = musa.graph_pool()
    keeper, graph = musa.graph(pool), musa.graph(pool)
    x = torch.ones(3, device=musa.device)
    with keeper.capture():
        x + 1
    with pytest.raises(CaptureError), graph.capture():
        x.sum().item()
    with pytest.raises(CaptureError, match="already recording"), graph.capture():
        x + 1
    monkeypatch.undo()
    end_recording(musa.index, keeper.pool_handle)
    keeper.close()
    assert works(musa)


@pytest.mark.parametrize("fault", ["captures_nothing", "max_live_graphs"])
@pytest.mark.parametrize("record_stream_reuse", [False, True])
def test_a_capture_that_ends_and_is_not_accepted_keeps_no_share(musa, fault, record_stream_reuse):
    """The recording is over then. reset() of newer releases gives the share back if the graph was accepted only."""
    simulated.machine.record_stream_reuse, before, graph = record_stream_reuse, reserved(musa), musa.graph()
    x, healthy = torch.ones(3, device=musa.device), vars(simulated.machine).copy()
    for _ in range(2):
        setattr(simulated.machine, fault, {"captures_nothing": True, "max_live_graphs": 0}[fault])
        with pytest.raises(CaptureError), graph.capture():
            torch.zeros(8 << 20, device=musa.device)
        vars(simulated.machine).update(healthy)
        with pytest.raises(CaptureError), graph.capture():  # and after a capture that fails before its end
            torch.zeros(8 << 20, device=musa.device).sum().item()
    graph.close()
    assert reserved(musa) - before < 8 << 20
    assert works(musa)
    del x


def test_a_capture_collects_no_garbage(musa):
    """A collection per capture, as in torch_musa's graph(), took minutes with a hundred graphs."""
    collections, graph = [], musa.graph()
    gc.callbacks.append(lambda *args: collections.append(args))
    try:
        gc.disable()  # no collection of Python's own
        with graph.capture():
            torch.ones(3, device=musa.device)
    finally:
        gc.enable()
        gc.callbacks.pop()
    assert collections == []
    graph.close()


def test_the_default_stream_is_refused_by_the_runtime():
    platform = MusaPlatform(0, Policy(), found={})
    platform.capture_stream = platform.musa.default_stream(platform.index)
    graph = platform.graph()
    with pytest.raises(CaptureError, match="default stream"), graph.capture():
        pass
    platform.capture_stream = platform.stream()
    assert works(platform)
    graph.close()


def test_without_healing_the_generator_other_graphs_do_not_replay(musa, monkeypatch):
    graph, failing = musa.graph(), musa.graph()
    x = torch.ones(3, device=musa.device)
    with graph.capture():
        x + 1
    monkeypatch.setattr("specgraph_musa.graph.heal_generator", lambda platform: None)
    with pytest.raises(CaptureError), failing.capture():
        x.sum().item()
    with pytest.raises(RuntimeError, match="outside graph capture"):
        graph.replay()
    monkeypatch.undo()
    graph.close()
    assert works(musa)


@pytest.mark.parametrize("first_inside", [True, False])
def test_captures_and_replays_inside_and_outside_inference_mode(musa, first_inside, monkeypatch):
    """The first live graph makes the generator's tensors, all others fill them in place (sglang-omni #2168)."""
    monkeypatch.setattr("torch_musa.graphs.generator", Generator())  # as before any capture of this process
    x, graphs = torch.ones(3, device=musa.device), [musa.graph(), musa.graph()]
    results = []
    for inside, graph in zip((first_inside, not first_inside), graphs, strict=True):
        with torch.inference_mode(inside), graph.capture():
            results.append(x + 1)
    for inside in (True, False):
        with torch.inference_mode(inside):
            for graph in graphs:
                graph.replay()
    assert [y.tolist() for y in results] == [[2.0] * 3] * 2
    for graph in graphs:
        graph.close()


def test_so_beside_a_graph_that_another_library_captured_in_inference_mode(musa, monkeypatch):
    monkeypatch.setattr("torch_musa.graphs.generator", Generator())  # as before any capture of this process
    foreign = musa.musa.MUSAGraph()
    with torch.inference_mode(), musa.use(musa.capture_stream):
        foreign.capture_begin(musa.musa.graph_pool_handle())
        torch.ones(3, device=musa.device)
        foreign.capture_end()
    graph, x = musa.graph(), torch.ones(3, device=musa.device)
    with graph.capture():
        y = x + 1
    graph.replay()
    assert y.tolist() == [2.0] * 3
    with pytest.raises(RuntimeError, match="nference"):  # what the vendor's own call does
        graph._raw.replay()
    graph.close()


def test_a_graph_that_nobody_closes_gives_its_memory_back(musa):
    before = reserved(musa)
    graph = musa.graph()
    with graph.capture():
        torch.zeros(8 << 20, device=musa.device)
    assert reserved(musa) > before
    del graph
    assert reserved(musa) == before


def test_graphs_of_a_pool_outlive_a_failed_capture_in_it(musa):
    """After a failed capture the pool's graphs stay valid, and later captures share a new handle."""
    before = reserved(musa)
    pool = musa.graph_pool()
    x = torch.ones(3, device=musa.device)
    graphs = [musa.graph(pool) for _ in range(4)]
    with graphs[0].capture():
        first = x + 1
    with pytest.raises(CaptureError), graphs[1].capture():
        x.sum().item()
    with graphs[2].capture():
        second = x + 2
    with graphs[3].capture():
        third = x + 3
    assert graphs[2].pool_handle == graphs[3].pool_handle
    for graph in (graphs[3], graphs[0], graphs[2]):
        graph.replay()
    assert [first[0].item(), second[0].item(), third[0].item()] == [2.0, 3.0, 4.0]
    for graph in graphs:
        graph.close()
    del first, second, third, x
    assert reserved(musa) <= before
