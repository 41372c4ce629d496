"""Pool memory: poisoned, reused inside a capture and between graphs, and given back."""

from __future__ import annotations

import gc

import pytest
import torch


def capture(graph, body):
    with graph.capture():
        return body()


@pytest.mark.parametrize(
    ("dtype", "is_poison"),
    [
        (torch.float32, torch.isnan),
        (torch.bfloat16, torch.isnan),
        (torch.float16, torch.isnan),
        (torch.float64, torch.isnan),
        (torch.complex64, torch.isnan),
        (torch.int64, lambda t: t > 2**60),
        (torch.int32, lambda t: t > 2**30),
        (torch.uint8, lambda t: t == 127),
        (torch.bool, lambda t: t),
    ],
)
def test_outputs_are_poisoned_until_the_first_replay(platform, dtype, is_poison):
    graph = platform.graph()
    x = torch.zeros(40, dtype=dtype)
    y = capture(graph, lambda: x + x)
    assert is_poison(y).all()
    graph.replay()
    assert not is_poison(y).any()


def test_blocks_are_reused_in_a_capture(platform):
    graph = platform.graph()
    x = torch.ones(1024)

    def body():
        y = x
        for _ in range(100):
            y = y + 1
        return y

    y = capture(graph, body)
    graph.replay()
    assert y[0] == 101
    assert platform.memory().allocated == 4096
    assert platform.memory().reserved == 1 << 20, "100 intermediates of 4 KiB need two blocks"


def test_free_blocks_are_kept_per_stream(platform):
    """Work of two streams runs at the same time: a block that one freed is not the other's to write."""
    graph, side, x, addresses = platform.graph(), platform.stream(), torch.ones(1024), []

    def body():
        for stream in (platform.current_stream(), side, platform.current_stream()):
            stream.wait_stream(platform.capture_stream)
            with platform.use(stream):
                addresses.append((x + 1).data_ptr())
        platform.capture_stream.wait_stream(side)

    capture(graph, body)
    assert addresses[0] == addresses[2] != addresses[1]


def test_memory_comes_back_when_the_graph_is_closed(platform):
    graph = platform.graph()
    x = torch.ones(1 << 19)
    y = capture(graph, lambda: (x + 1) * 2)
    assert platform.memory().reserved >= 2 * x.nbytes
    assert platform.memory().allocated == x.nbytes
    graph.close()
    assert platform.memory().allocated == x.nbytes, "the result outlives its graph"
    assert platform.memory().reserved == x.nbytes, "only the segment that it lies in stays"
    assert y.isnan().all()
    del y
    assert (platform.memory().allocated, platform.memory().reserved) == (0, 0)


def test_a_result_keeps_its_block_after_everything_else_is_gone(platform):
    pool = platform.graph_pool()
    graph = platform.graph(pool)
    x = torch.ones(5)
    y = capture(graph, lambda: x + 1)
    graph.replay()
    graph.close()
    pool.close()
    del graph, pool, platform
    gc.collect()
    assert y.tolist() == [2.0] * 5


def test_a_freed_block_is_poisoned(platform):
    graph = platform.graph()
    x = torch.ones(64)
    y = capture(graph, lambda: x + 1)
    graph.replay()
    from specgraph.cpu.baking import storage_at, tensor_over

    peek = tensor_over(storage_at(y.data_ptr(), y.nbytes), y)
    assert (peek == 2).all()
    del y
    assert peek.isnan().all()


def test_pool_clash(platform):
    """Graphs that share a pool: a dropped output's block is the next graph's, and a replay writes over it."""
    pool = platform.graph_pool()
    first, second = platform.graph(pool), platform.graph(pool)
    x = torch.ones(64)
    y = capture(first, lambda: x + 1)
    dropped = y.data_ptr()
    first.replay()
    del y
    z = capture(second, lambda: x * 10)
    assert z.data_ptr() == dropped
    second.replay()
    first.replay()
    assert (z == 2).all(), "the first graph's result lies where the second one's does, as on a device"


def test_many_captures_leave_nothing(platform):
    x = torch.ones(100)
    for _ in range(200):
        graph = platform.graph()
        y = capture(graph, lambda: x + 1)
        graph.replay()
        graph.close()
        del y
    assert (platform.memory().allocated, platform.memory().reserved) == (0, 0)
