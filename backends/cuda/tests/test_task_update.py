"""Task updates on a GPU: what an update rewrites, when it takes effect, and what it costs in memory.

Each check is a function that also runs on a deliberately broken version of the code, where it must fail.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from captured_updates import HostAttention, Stored, one_group_each, stalled

from specgraph.device import Graph, Platform, TaskGroup
from specgraph.errors import UpdateError


def queued_launch_keeps_its_values(platform: Platform) -> None:
    """An update issued while an earlier launch is queued, and one while it runs, change neither."""
    made, seen = Stored(platform, slow=20_000_000), []
    with stalled():  # an update that waits for the device would never end
        for values in ((1, 10), (2, 20), (3, 30)):
            made.replay(*values)
            seen.append(made.x.clone())
    for values in ((4, 40), (5, 50)):
        made.replay(*values)
        seen.append(made.x.clone())
    platform.synchronize()
    assert [x.tolist() for x in seen] == [[i, 10 * i] for i in range(1, 6)]
    assert made.total.tolist() == [15, 150]
    made.graph.close()


def only_the_group_is_rewritten(platform: Platform) -> None:
    """Equal kernels before, between and after two groups keep their captured parameters."""
    x = torch.zeros(5, device=platform.device)
    x[0].add_(1.0)
    platform.synchronize()
    graph, parts = platform.graph(), list(x.unbind())
    x.zero_()
    with graph.capture():
        parts[0].add_(1.0)
        with platform.task_group() as first:
            parts[1].add_(2.0)
        parts[2].add_(3.0)
        with platform.task_group() as second:
            parts[3].add_(4.0)
        parts[4].add_(5.0)
    with platform.task_update(second):
        parts[3].add_(40.0)
    with platform.task_update(first):
        parts[1].add_(20.0)
    graph.replay()
    platform.synchronize()
    assert x.tolist() == [1.0, 20.0, 3.0, 40.0, 5.0]
    graph.close()


def copies_and_fills_are_rewritten(platform: Platform) -> None:
    """A copy node's source is allocated in the group: an update moves it, and the copy must follow."""
    from cuda.bindings import driver

    source, out = torch.zeros(4096, device=platform.device), torch.zeros(4096, device=platform.device)
    filled = torch.zeros(4096, dtype=torch.uint8, device=platform.device)

    def work(value: float, byte: int) -> None:
        scratch = source + value
        out.copy_(scratch)
        stream = torch.cuda.current_stream().cuda_stream
        assert int(driver.cuMemsetD8Async(filled.data_ptr(), byte, filled.numel(), stream)[0]) == 0

    work(1.0, 3)
    platform.synchronize()
    graph = platform.graph()
    with graph.capture(), platform.task_group() as group:
        work(1.0, 3)
    for value, byte in ((5.0, 7), (6.0, 9)):
        with platform.task_update(group):
            work(value, byte)
        graph.replay()
        platform.synchronize()
        assert (float(out.min()), float(out.max()), int(filled.min()), int(filled.max())) == (value, value, byte, byte)
    graph.close()


def updates_take_no_memory(platform: Platform, count: int = 3000, turns: int = 20) -> None:
    """Work that allocates in its group, updated many times.

    Free memory is the whole device's, and other processes take and give some of it. One turn without a change is
    enough: updates that take memory take it in each turn.
    """
    source, out = torch.ones(1 << 16, device=platform.device), torch.zeros(1 << 16, device=platform.device)
    out.copy_(source + 1.0)
    platform.synchronize()
    graph = platform.graph()
    with graph.capture(), platform.task_group() as group:
        out.copy_(source + 1.0)

    def change_of_free_memory(updates: int) -> int:
        before = torch.cuda.mem_get_info()[0]
        for value in range(updates):
            with platform.task_update(group):
                out.copy_(source + float(value))
            graph.replay()
        platform.synchronize()
        assert float(out.min()) == float(out.max()) == updates
        return abs(torch.cuda.mem_get_info()[0] - before)

    change_of_free_memory(20)
    reserved = platform.memory().reserved
    assert any(change_of_free_memory(count) <= 4 << 20 for _ in range(turns))
    assert platform.memory().reserved == reserved
    graph.close()


def a_graph_dropped_in_an_update_ends_nothing(platform: Platform) -> None:
    """The last reference to another graph, and to its pool, goes while an update of this one is captured."""
    source, out = torch.ones(1 << 16, device=platform.device), torch.zeros(1 << 16, device=platform.device)
    out.copy_(source + 1.0)
    platform.synchronize()

    def captured() -> tuple[Graph, TaskGroup]:
        graph = platform.graph()
        with graph.capture(), platform.task_group() as group:
            out.copy_(source + 1.0)
        with platform.task_update(group):
            out.copy_(source + 2.0)
        graph.replay()
        return graph, group

    (graph, group), dropped = captured(), [captured()]
    platform.synchronize()
    reserved = platform.memory().reserved
    for value in (5.0, 6.0):
        with platform.task_update(group):
            out.copy_(source + value)
            dropped.clear()
            gc.collect()
        graph.replay()
        platform.synchronize()
        assert float(out.min()) == float(out.max()) == value + 1
    assert platform.memory().reserved < reserved, "the memory of a graph dropped in an update was never freed"
    graph.close()


def queued_attention_keeps_its_lengths(platform: Platform) -> None:
    """The same as `queued_launch_keeps_its_values`, for an op whose update sets parameters and captures nothing."""
    made, seen = HostAttention(platform, [1, 1]), []
    with stalled():
        for lengths in ([3, 40], [64, 1], [7, 8]):
            made.replay(lengths)
            seen.append((lengths, made.out.clone()))
    for lengths, out in seen:
        assert torch.equal(out, made.with_device_lengths(lengths)), lengths
    made.graph.close()


CHECKS = [
    queued_launch_keeps_its_values,
    queued_attention_keeps_its_lengths,
    only_the_group_is_rewritten,
    copies_and_fills_are_rewritten,
    updates_take_no_memory,
    a_graph_dropped_in_an_update_ends_nothing,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__)
def test_updates(updating: Platform, check: Callable[[Platform], None]) -> None:
    check(updating)


def _hits_running_launch(patch: pytest.MonkeyPatch) -> None:
    """Values lie in host memory that a launch reads when it runs: an update changes launches that are queued."""
    from specgraph_cuda.task_update import host_values

    held = torch.zeros(2, dtype=torch.int32).pin_memory()

    def store(out: torch.Tensor, values: Any) -> None:
        held.copy_(torch.tensor(values, dtype=torch.int32))
        out.copy_(held, non_blocking=True)

    patch.setattr(host_values, "store", store)


def _lengths_hit_running_launch(patch: pytest.MonkeyPatch) -> None:
    """The same, where an update of an op with host values writes them."""
    from specgraph_cuda.task_update import nodes
    from specgraph_cuda.task_update.host_values import StoredValues

    held: dict[int, torch.Tensor] = {}

    def fill(self: StoredValues, values: Any) -> None:
        place = self.memory.data_ptr()
        if place not in held:  # not in an update: a capture refuses to pin memory
            held[place] = torch.zeros(len(values), dtype=torch.int32).pin_memory()
        held[place].copy_(torch.tensor(values, dtype=torch.int32))

    def issue(self: StoredValues) -> None:
        self.memory.copy_(held[self.memory.data_ptr()], non_blocking=True)

    patch.setattr(StoredValues, "fill", fill)
    patch.setattr(StoredValues, "issue", issue)
    patch.setattr(StoredValues, "parameters", lambda self: list(self.nodes))
    patch.setattr(nodes, "rewrite", lambda *arguments: None)


def _other_node(patch: pytest.MonkeyPatch) -> None:
    """A group takes the node before its own."""
    from specgraph_cuda.task_update import nodes

    real = nodes.between
    patch.setattr(nodes, "between", lambda before, after: list(before) or real(before, after))


def _misses_memcpy(patch: pytest.MonkeyPatch) -> None:
    """Copy nodes keep their captured parameters."""
    from specgraph_cuda.task_update import nodes

    real, copies = nodes.rewrite, nodes.cu.CUDA_MEMCPY3D
    patch.setattr(nodes, "rewrite", lambda e, n, p: None if isinstance(p, copies) else real(e, n, p))


def _pool_grows(patch: pytest.MonkeyPatch) -> None:
    """Every update allocates from a new pool, which stays."""
    from specgraph_cuda.task_update.graph import UpdatableGraphPool

    kept: list[torch.cuda.MemPool] = []

    def update_memory(self: UpdatableGraphPool) -> torch.cuda.MemPool:
        kept.append(torch.cuda.MemPool())
        return kept[-1]

    patch.setattr(UpdatableGraphPool, "update_memory", property(update_memory))


MUTANTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Callable[..., None]]] = {
    "update-hits-running-launch": (_hits_running_launch, queued_launch_keeps_its_values),
    "update-hits-running-attention": (_lengths_hit_running_launch, queued_attention_keeps_its_lengths),
    "update-of-other-node": (_other_node, only_the_group_is_rewritten),
    "group-misses-memcpy": (_misses_memcpy, copies_and_fills_are_rewritten),
    "throwaway-pool-grows": (_pool_grows, lambda platform: updates_take_no_memory(platform, 40)),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(updating: Platform, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken, check = MUTANTS[name]
    broken(monkeypatch)
    with pytest.raises((AssertionError, UpdateError)):
        check(updating)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("query_lens", [[1, 1, 1], [6, 6, 6], [4, 1, 7], [9]], ids=str)
def test_host_lengths_give_the_bits_of_device_lengths(
    updating: Platform, query_lens: list[int], window: int | None
) -> None:
    made = HostAttention(updating, query_lens, window)
    top = torch.Generator().manual_seed(3)
    for _ in range(20):
        # A request is as long as its rows at least, or inert.
        free = torch.randint(0, 54, (len(query_lens),), generator=top).tolist()
        seq_lens = [rows + more if more else 0 for rows, more in zip(query_lens, free, strict=True)]
        made.replay(seq_lens)
        updating.synchronize()
        assert torch.equal(made.out, made.with_device_lengths(seq_lens)), seq_lens
    made.graph.close()


def test_many_groups_in_any_order_of_updates(updating: Platform) -> None:
    x = torch.zeros(24, device=updating.device)
    parts = list(x.unbind())
    graph, groups = one_group_each(updating, parts, lambda part: part.mul_(2.0).add_(1.0))
    expected = torch.zeros(24)
    for number in range(1, 6):
        for i in torch.randperm(24).tolist():
            with updating.task_update(groups[i]):
                parts[i].mul_(2.0)
                parts[i].add_(float(number * i))
        graph.replay()
        expected = expected * 2 + number * torch.arange(24.0)
    updating.synchronize()
    assert torch.equal(x.cpu(), expected)
    graph.close()


def test_lists_longer_than_one_launch_may_carry(updating: Platform) -> None:
    from specgraph_cuda.task_update.host_values import store

    values = torch.randint(-(1 << 31), 1 << 31, (2500,)).tolist()
    out = torch.zeros(2500, dtype=torch.int32, device=updating.device)
    store(out, values)
    assert out.tolist() == values
    assert all(a != b for a, b in pairwise(sorted(set(values))))
