"""Captures that fail must leave the device usable, and say what was wrong."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable

import pytest
import torch
from specgraph_cuda.backend import open_device
from specgraph_cuda.probe import TASK_UPDATE
from specgraph_run.tools.shapes import SHAPES, random_head

from specgraph.attention import allocate_caches
from specgraph.device import Platform
from specgraph.draft import DraftConfig, Drafter, ProposeBatch
from specgraph.errors import CaptureError, HostReadError, PlatformError, UnsupportedError


def _captures_and_replays(platform: Platform) -> None:
    x = torch.zeros(4, device=platform.device)
    graph = platform.graph()
    with platform.use(platform.capture_stream):
        x + 1
    with graph.capture():
        y = x + 1
    x.fill_(41)
    graph.replay()
    assert y.tolist() == [42.0] * 4
    graph.close()


def _read(x: torch.Tensor) -> object:
    return x.sum().item()


def _branch(x: torch.Tensor) -> object:
    return x + 1 if x.sum() > 0 else x


def _copy(x: torch.Tensor) -> object:
    return x.cpu()


def _synchronise(x: torch.Tensor) -> object:
    return torch.cuda.synchronize()


def _dynamic(x: torch.Tensor) -> object:
    return x.nonzero()


@pytest.mark.parametrize("bad", [_read, _branch, _copy, _dynamic], ids=lambda f: f.__name__)
def test_host_read_is_refused_and_the_device_survives(
    platform: Platform, bad: Callable[[torch.Tensor], object]
) -> None:
    x = torch.ones(4, device=platform.device)
    bad(x)
    graph = platform.graph()
    with pytest.raises(HostReadError, match="on the host"), graph.capture():
        bad(x)
    assert not platform.is_capturing()
    assert torch.equal(x + 1, torch.full_like(x, 2))
    assert torch.rand(4, device=platform.device).max() <= 1
    _captures_and_replays(platform)
    with graph.capture():  # the same graph object is empty and usable
        y = x * 3
    graph.replay()
    assert y.tolist() == [3.0] * 4


def test_device_synchronise_in_capture(platform: Platform) -> None:
    with pytest.raises(CaptureError), platform.graph().capture():
        _synchronise(torch.ones(1))
    _captures_and_replays(platform)


def test_out_of_memory_in_capture_leaks_nothing(platform: Platform) -> None:
    torch.cuda.empty_cache()
    before = platform.memory().reserved
    _, total = torch.cuda.mem_get_info()
    held: list[torch.Tensor] = []

    def allocate() -> None:
        for size in (1 << 22, total * 2):
            held.append(torch.empty(size, dtype=torch.uint8, device=platform.device))

    with pytest.raises(CaptureError, match="out of memory"), platform.graph().capture():
        allocate()
    held.clear()
    gc.collect()  # the error's frames hold the graph that failed
    torch.cuda.empty_cache()
    assert platform.memory().reserved <= before
    _captures_and_replays(platform)


def _out_of_memory(x: torch.Tensor) -> object:
    return torch.empty(torch.cuda.mem_get_info()[1] * 2, dtype=torch.uint8, device=x.device)


def _own_mistake(x: torch.Tensor) -> object:
    raise ValueError("mistake")


@pytest.mark.parametrize("bad", [_read, _out_of_memory, _own_mistake], ids=lambda f: f.__name__)
def test_a_pool_serves_on_after_a_failed_capture(platform: Platform, bad: Callable[[torch.Tensor], object]) -> None:
    """The next capture takes what the failed one had, graphs captured before replay, and nothing stays."""
    torch.cuda.empty_cache()
    before, size = platform.memory().reserved, 64 << 20
    x = torch.ones(4, device=platform.device)
    pool = platform.graph_pool()
    first, failed, last = (platform.graph(pool) for _ in range(3))
    with first.capture():
        y = x * 3

    def half_way() -> None:
        kept = torch.empty(size, dtype=torch.uint8, device=platform.device).fill_(1)
        bad(kept[:4])

    with pytest.raises((CaptureError, ValueError)), failed.capture():
        half_way()
    gc.collect()  # the error's frames may hold what the capture had made
    with last.capture():
        z = torch.empty(size, dtype=torch.uint8, device=platform.device).fill_(2)
        w = x * 5
    assert platform.memory().reserved < before + 1.5 * size  # one buffer, not two
    first.replay()
    last.replay()
    assert (y.tolist(), w.tolist(), int(z[-1])) == ([3.0] * 4, [5.0] * 4, 2)
    del y, z, w
    for graph in (first, failed, last):
        graph.close()
    pool.close()
    gc.collect()  # the error's frames hold what the capture had made
    torch.cuda.empty_cache()
    assert platform.memory().reserved <= before + (2 << 20)  # `x` and the allocator's smallest segment


def test_a_capture_that_cannot_begin(platform: Platform) -> None:
    own, platform.capture_stream = platform.capture_stream, torch.cuda.default_stream(platform.device)
    try:
        with pytest.raises(CaptureError, match="could not begin"), platform.graph().capture():
            pass
    finally:
        platform.capture_stream = own
    assert not platform.is_capturing()
    _captures_and_replays(platform)


def test_smaller_sizes_after_out_of_memory(platform: Platform) -> None:
    """A drafter whose largest size does not fit says so and leaves nothing; one of smaller sizes then works."""
    head = random_head(SHAPES["eagle3-tiny-python"], platform.device, torch.bfloat16, 4096)
    caches = allocate_caches(head.attention_layers, 300, 16, torch.bfloat16, platform.device)

    def drafter(sizes: list[int]) -> Drafter:
        config = DraftConfig(
            num_speculative_tokens=5,
            max_num_requests=sizes[-1],
            max_model_len=4096,
            capture_sizes=sizes,
            prefill_sizes=[16],
            decode="merged",
        )
        return Drafter(head, caches, platform, config)

    with torch.inference_mode():
        small = drafter([8])
        small.capture()  # libraries take their workspaces once per process
        small.close()
        torch.cuda.empty_cache()
        large = drafter([8, 16384])
        torch._C._cuda_clearCublasWorkspaces()  # one per stream that ever captured, kept by the library
        before, total = platform.memory().reserved, platform.memory().total
        torch.cuda.set_per_process_memory_fraction((before + (128 << 20)) / total, platform.device)
        try:
            with pytest.raises(CaptureError, match="out of memory"):
                large.capture()
            large.close()
            gc.collect()  # the error's frames hold what the capture had made
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
            assert platform.memory().reserved <= before
            small = drafter([8])
            small.capture()
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, platform.device)
        batch = ProposeBatch(
            sampled_token_ids=torch.zeros(2, 6, dtype=torch.int64, device=platform.device),
            num_sampled=torch.ones(2, dtype=torch.int32, device=platform.device),
            start_positions=torch.zeros(2, dtype=torch.int64, device=platform.device),
            aux_hidden=torch.randn(12, head.aux_size, device=platform.device).bfloat16(),
            block_table=torch.tensor([[1], [2]], dtype=torch.int32, device=platform.device),
        )
        assert small.propose(batch).token_ids.shape == (2, 5)
        small.close()


def test_a_gpu_without_task_updates(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    """The optional module is not there: graphs are captured and launched as before, and a task group is refused."""
    monkeypatch.setitem(sys.modules, TASK_UPDATE, None)
    alone = open_device(platform.device.index)
    assert not alone.capabilities.task_update
    for _ in range(2):
        _captures_and_replays(alone)
    x, graph = torch.zeros(4, device=alone.device), alone.graph()
    with graph.capture():
        x.add_(1)
    for _ in range(3):  # the first one by torch, the others by the driver
        graph.replay()
    assert x.tolist() == [3.0] * 4
    graph.close()
    assert alone.counts() == {}
    with pytest.raises(UnsupportedError, match=f"has no task update: this installation .* without {TASK_UPDATE}"):
        alone.task_group()
    alone.close()
    _captures_and_replays(platform)


def test_a_stranger_s_stream_is_refused(platform: Platform) -> None:
    with pytest.raises(PlatformError, match="no stream of"):
        platform.use(object())  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("draws", [False, True])
def test_a_graph_is_launched_by_the_driver_unless_it_draws_random_numbers(platform: Platform, draws: bool) -> None:
    """Launched behind other work of two streams, four times each."""
    x, graph = torch.zeros(1 << 16, device=platform.device), platform.graph()

    def work() -> None:
        x.mul_(3).add_(torch.rand_like(x) if draws else 1)

    with platform.use(platform.capture_stream):
        work()
    platform.synchronize()
    with graph.capture():
        work()
    found: list[torch.Tensor] = []
    for run in (work, graph.replay):
        torch.cuda.manual_seed(5)
        x.zero_()
        for number in range(8):
            stream = platform.capture_stream if number >= 4 else platform.current_stream()
            stream.wait_stream(platform.current_stream())
            with platform.use(stream):
                x.mul_(2)
                run()
        platform.synchronize()
        found.append(x.clone())
    assert torch.equal(*found)
    assert (vars(graph)["_by_driver"] is None) == draws
    graph.close()
