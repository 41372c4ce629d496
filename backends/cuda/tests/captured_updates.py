"""Captures of the tests of task updates, and a stall that keeps launches queued."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from specgraph import ops
from specgraph.device import Graph, Platform, TaskGroup


@contextlib.contextmanager
def stalled() -> Iterator[None]:
    """Blocks the current stream while the block lasts: the launches of the block are queued, not running."""
    from cuda.bindings import driver

    flag = torch.zeros(1, dtype=torch.int32).pin_memory()
    (status,) = driver.cuStreamWaitValue32(torch.cuda.current_stream().cuda_stream, flag.data_ptr(), 1, 0)
    assert int(status) == 0, status
    try:
        yield
    finally:
        flag.fill_(1)
        torch.cuda.current_stream().synchronize()  # the flag may go


def one_group_each(
    platform: Platform, parts: list[torch.Tensor], work: Callable[[torch.Tensor], object]
) -> tuple[Graph, list[TaskGroup]]:
    """A graph that does `work` on each part in a task group of its own."""
    parts[0].add_(1.0).zero_()
    graph, groups = platform.graph(), list[TaskGroup]()
    with graph.capture():
        for part in parts:
            with platform.task_group() as group:
                work(part)
            groups.append(group)
    return graph, groups


class Stored:
    """A graph that stores host values into `x` in a task group, then adds `x` to `total` and logs it."""

    def __init__(self, platform: Platform, slow: int = 0) -> None:
        from specgraph_cuda.task_update import host_values

        self.platform, self.store = platform, lambda *values: host_values.store(self.x, values)
        self.x, self.total = (torch.zeros(2, dtype=torch.int32, device=platform.device) for _ in range(2))
        self.store(0, 0)
        self.total.add_(self.x).zero_()
        platform.synchronize()
        self.graph = platform.graph()
        with self.graph.capture():
            if slow:
                torch.cuda._sleep(slow)
            with platform.task_group() as self.group:
                self.store(1, 1)
            self.total.add_(self.x)

    def replay(self, *values: int) -> None:
        with self.platform.task_update(self.group):
            self.store(*values)
        self.graph.replay()


class HostAttention:
    """Attention with host lengths captured in a task group; block table of 4 blocks of 16 per request.

    `window`: the most keys that a row sees, with sinks. None: no window, no sinks.
    """

    def __init__(self, platform: Platform, query_lens: list[int], window: int | None = None) -> None:
        self.platform, self.query_lens = platform, query_lens
        sinks = torch.linspace(-1, 1, 8, device=platform.device)
        self.mask = ops.Mask() if window is None else ops.Mask(window=window, sinks=sinks)
        requests = len(query_lens)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=platform.device, dtype=torch.bfloat16)

        self.query = random(sum(query_lens), 8, 64)
        self.cache = ops.KVCache(random(1 + 4 * requests, 16, 2, 64), random(1 + 4 * requests, 16, 2, 64))
        self.table = torch.arange(1, 1 + 4 * requests, dtype=torch.int32, device=platform.device).view(requests, 4)
        self.out = torch.zeros_like(self.query)
        self._attend([0] * requests)
        platform.synchronize()
        self.graph = platform.graph()
        with self.graph.capture(), platform.task_group() as self.group:
            self._attend([0] * requests)

    def _attend(self, seq_lens: list[int]) -> None:
        lengths = ops.HostLengths(self.query_lens, seq_lens)
        ops.paged_attention_host(self.query, self.cache, self.table, lengths, self.mask, scale=0.125, out=self.out)

    def replay(self, seq_lens: list[int]) -> None:
        with self.platform.task_update(self.group):
            self._attend(seq_lens)
        self.graph.replay()

    def with_device_lengths(self, seq_lens: list[int]) -> torch.Tensor:
        starts = torch.tensor([0, *self.query_lens], device="cuda").cumsum(0).int()
        lengths = torch.tensor(seq_lens, dtype=torch.int32, device="cuda")
        each = max(self.query_lens) if len(set(self.query_lens)) == 1 else self.query.shape[0]
        on_device = ops.DeviceLengths(lengths, starts, each)
        return ops.paged_attention(self.query, self.cache, self.table, on_device, self.mask, scale=0.125)
