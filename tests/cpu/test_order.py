"""Streams and events in a capture: order that is missing is an error, and a stream takes part or it does not."""

# ruff: noqa: PT012  (a capture or update raises from its body or at its end: both belong in the block)
from __future__ import annotations

import pytest
import torch

from specgraph.errors import CaptureError, OrderError


def fork_join(platform, side, body, *, fork=True, join=True):
    """A body that runs `body` on `side` beside its own work."""
    main = platform.current_stream()
    if fork:
        side.wait_stream(main)
    with platform.use(side):
        result = body()
    if join:
        main.wait_stream(side)
    return result


def test_fork_and_join(platform, side):
    x, y = torch.ones(4), torch.ones(4)
    graph = platform.graph()
    with graph.capture():
        x.add_(1)
        doubled = fork_join(platform, side, lambda: x * 2)
        y.copy_(doubled)
    graph.replay()
    assert y.tolist() == [4.0] * 4


@pytest.mark.parametrize("write", [lambda x: x.add_(1), lambda x: torch.add(torch.ones(4), 1, out=x)])
def test_conflict_in_a_capture(platform, side, write):
    x = torch.ones(4)
    graph = platform.graph()
    with pytest.raises(OrderError, match=r"aten\.mul.*test_order.*aten\.add.*test_order"), graph.capture():
        main = platform.current_stream()
        side.wait_stream(main)
        write(x)  # after the fork: side doesn't know of it
        with platform.use(side):
            x * 2
        main.wait_stream(side)


def test_write_after_unordered_read(platform, side):
    x = torch.ones(4)
    graph = platform.graph()
    with pytest.raises(OrderError), graph.capture():
        fork_join(platform, side, lambda: x * 2, join=False)
        x.add_(1)


def test_two_reads_need_no_order(platform, side):
    x = torch.ones(4)
    graph = platform.graph()
    with graph.capture():
        main = platform.current_stream()
        side.wait_stream(main)
        a = x + 1
        with platform.use(side):
            b = x * 3
        main.wait_stream(side)
    graph.replay()
    assert (a.tolist(), b.tolist()) == ([2.0] * 4, [3.0] * 4)


@pytest.mark.parametrize("interleaved", [False, True])
def test_disjoint_parts_of_one_tensor_need_no_order(platform, side, interleaved):
    """Interleaved columns: byte intervals overlap, elements don't."""
    x = torch.zeros(4, 6)
    mine, theirs = (x[:, ::2], x[:, 1::2]) if interleaved else (x[:2], x[2:])
    graph = platform.graph()
    with graph.capture():
        main = platform.current_stream()
        side.wait_stream(main)
        mine.add_(1)
        with platform.use(side):
            theirs.add_(2)
        main.wait_stream(side)
    graph.replay()
    assert (mine == 1).all()
    assert (theirs == 2).all()


def test_overlapping_columns_conflict(platform, side):
    x = torch.zeros(4, 6)
    graph = platform.graph()
    with pytest.raises(OrderError), graph.capture():
        side.wait_stream(platform.current_stream())
        x[:, ::2].add_(1)
        with platform.use(side):
            x[:, ::3].add_(2)


def test_a_block_freed_on_another_stream_is_not_reused_too_early(platform, side):
    """The block of `a` goes back to its stream while the side stream still reads it: the next writer conflicts."""

    def read_on_the_side_and_drop(a):
        fork_join(platform, side, lambda: a * 2, join=False)

    x = torch.ones(64)
    graph = platform.graph()
    with pytest.raises(OrderError), graph.capture():
        read_on_the_side_and_drop(x + 1)
        x + 3


def test_unjoined_fork(platform, side):
    x = torch.ones(4)
    graph = platform.graph()
    with pytest.raises(CaptureError, match="never joined"), graph.capture():
        fork_join(platform, side, lambda: x * 2, join=False)
    with graph.capture():
        fork_join(platform, side, lambda: x * 2)
    graph.replay()


def test_stream_that_takes_no_part(platform, side):
    x = torch.ones(4)
    graph = platform.graph()
    with pytest.raises(CaptureError, match="takes no part"), graph.capture(), platform.use(side):
        x.add_(1)


def test_capture_on_a_given_stream(platform, side):
    x = torch.ones(4)
    graph = platform.graph()
    platform.capture_stream = side
    with graph.capture():
        assert platform.current_stream() is side
        assert platform.is_capturing()
        x.add_(1)
    assert not platform.is_capturing()
    graph.replay()
    assert x.tolist() == [2.0] * 4


def test_plain_events_do_not_cross_the_border_of_a_capture(platform):
    x = torch.ones(4)
    before = platform.event()
    before.record()
    graph = platform.graph()
    with pytest.raises(CaptureError, match="outside of the capture"), graph.capture():
        before.wait()
    inside = platform.event()
    with graph.capture():
        x.add_(1)
        inside.record()
    with pytest.raises(CaptureError, match="only in a capture"):
        inside.wait()
