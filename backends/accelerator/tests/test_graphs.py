"""Captures and replays of the device against eager on the CPU."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specgraph.device import Platform
from specgraph.errors import CaptureError, HostReadError
from torch import Tensor

from torch_asynccpu import held

STEPS = {
    "add": lambda a, b: a.add_(b),
    "scale": lambda a, b: a.mul_(0.5),
    "copy": lambda a, b: a.copy_(b * 2 - 1),
    "matmul": lambda a, b: a.copy_(torch.tanh(a @ b.T)),
    "rows": lambda a, b: a[1:].copy_(b[:-1].clone()),
    "where": lambda a, b: a.copy_(torch.where(a > b, a, b)),
    "sorted": lambda a, b: a.copy_(a.sort(dim=-1).values),
}
PROGRAM = st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 2), st.integers(0, 2), st.booleans()))


def tensors(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(4, 4, generator=generator) for _ in range(3)]


def run(program: list[tuple[str, int, int, bool]], on: list[Tensor], platform: Platform | None = None) -> None:
    """The steps in order; on a device, those marked so run on a second stream, ordered on both sides."""
    side = platform.stream() if platform else None
    for name, i, j, apart in program:
        if platform is None or side is None or not apart:
            STEPS[name](on[i], on[j])
            continue
        main = platform.current_stream()
        side.wait_stream(main)
        with platform.use(side):
            STEPS[name](on[i], on[j])
        main.wait_stream(side)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(PROGRAM.filter(bool), st.integers(0, 99), st.integers(1, 3))
def test_a_random_program_replays_as_eager_runs(
    platform: Platform, program: list[tuple[str, int, int, bool]], seed: int, replays: int
) -> None:
    wanted, seen = tensors(seed), [x.to(platform.device) for x in tensors(seed)]
    platform.synchronize()
    graph = platform.graph()
    with graph.capture():
        run(program, seen, platform)
    noise = [torch.full((4, 4), float("nan"), device=platform.device) for _ in range(4)]
    for _ in range(replays):
        run(program, wanted)
        graph.replay()
    platform.synchronize()
    for a, b in zip(seen, wanted, strict=True):
        assert torch.equal(a.cpu(), b)
    assert len(noise) == 4
    graph.close()


def test_a_replay_waits_for_its_stream_and_for_no_other(platform: Platform) -> None:
    x, y = torch.zeros(8, device=platform.device), torch.zeros(8, device=platform.device)
    platform.synchronize()
    graph, side = platform.graph(), platform.stream()
    with graph.capture():
        y.copy_(x * 2)
    with held(), platform.use(side):  # it is the default stream that stands still
        x.fill_(3)
        graph.replay()
        assert y.cpu().tolist() == [6.0] * 8
    with platform.use(side), held():
        x.fill_(5)
        graph.replay()
        with platform.use(platform.stream()):
            assert y.cpu().tolist() == [6.0] * 8
    platform.synchronize()
    assert y.cpu().tolist() == [10.0] * 8
    graph.close()


def test_freed_memory_of_a_capture_stays_the_graphs(platform: Platform) -> None:
    x = torch.ones(1 << 12, device=platform.device)
    platform.synchronize()
    graph = platform.graph()
    with graph.capture():
        scratch = x * 7
        addresses = {scratch.data_ptr()}
        del scratch
        (x * 2).sum()
    with platform.use(platform.capture_stream):  # where the allocator would give the same block again
        others = [torch.empty(1 << 12, device=platform.device) for _ in range(8)]
    assert not addresses & {t.data_ptr() for t in others}
    before = platform.memory().reserved
    graph.close()
    gc.collect()
    assert platform.memory().reserved < before


def test_graphs_of_one_pool_share_its_memory(platform: Platform) -> None:
    """The second graph takes the scratch memory of the first one: its capture reserves nothing."""
    x, total = torch.ones(1 << 20, device=platform.device), torch.zeros(1, device=platform.device)
    grown = list[int]()
    for pool in (platform.graph_pool(), None):
        graphs = [platform.graph(pool) for _ in range(2)]
        for graph in graphs:
            platform.synchronize()
            before = platform.memory().reserved
            with graph.capture():
                total.add_((x * 3).exp().sum())
        grown.append(platform.memory().reserved - before)
        for graph in graphs:
            graph.close()
    assert grown[0] < 1 << 20, "the second graph of the pool took memory of its own"
    assert grown[1] >= 8 << 20, "graphs without a pool share one"


@pytest.mark.parametrize(
    ("what", "body"),
    [
        ("a stream", lambda p, x, e: p.current_stream().synchronize()),
        ("the device", lambda p, x, e: p.synchronize()),
        ("whether a stream is done", lambda p, x, e: p.current_stream().query()),
        ("an event", lambda p, x, e: e.synchronize()),
        ("a mask", lambda p, x, e: x[x > 0]),
        ("pageable memory", lambda p, x, e: x.copy_(torch.ones(4))),
    ],
)
def test_waits_in_a_capture_are_host_reads(platform: Platform, what: str, body: object) -> None:
    """Also where the captured code swallows the error: the device invalidates the capture."""
    x, event = torch.ones(4, device=platform.device), platform.event()
    event.record()
    platform.synchronize()
    pool = platform.graph_pool()
    graph = platform.graph(pool)
    for swallowed in (), RuntimeError:
        with pytest.raises(HostReadError), graph.capture():
            x.add_(1)
            with contextlib.suppress(swallowed):
                body(platform, x, event)  # type: ignore[operator]
        with platform.use(platform.capture_stream):
            assert not platform.is_capturing()
        assert pool.num_graphs == 0
        assert x.cpu().tolist() == [1.0] * 4
    with graph.capture():
        x.add_(1)
    graph.replay()
    assert x.cpu().tolist() == [2.0] * 4
    graph.close()


def test_work_outside_of_the_capture_is_not_waited_for_inside(platform: Platform) -> None:
    x, event = torch.ones(4, device=platform.device), platform.event()
    event.record(platform.stream())
    graph = platform.graph()
    with pytest.raises(CaptureError, match="outside of the capture"), graph.capture():
        event.wait()
        x.add_(1)
    graph.close()


def test_an_event_of_a_capture_is_no_event_afterwards(platform: Platform) -> None:
    x, event, graph = torch.ones(4, device=platform.device), platform.event(), platform.graph()
    platform.synchronize()
    with graph.capture():
        x.add_(1)
        event.record()
    with pytest.raises(RuntimeError, match="capture that is over"):
        event.wait()
    with pytest.raises(RuntimeError, match="not permitted"):
        event.query()
    graph.close()


def test_replays_draw_on_where_eager_stopped(platform: Platform) -> None:
    def body() -> Tensor:
        return torch.cat([torch.rand(3, device=platform.device), torch.randn(3, device=platform.device)])

    torch.manual_seed(5)
    wanted = [body().cpu() for _ in range(4)]
    graph = platform.graph()
    with graph.capture():
        drawn = body()
    torch.manual_seed(5)
    seen = [body().cpu()]
    for _ in range(2):
        graph.replay()
        seen.append(drawn.cpu())
    seen.append(body().cpu())
    assert torch.equal(torch.stack(seen), torch.stack(wanted))
    graph.close()
