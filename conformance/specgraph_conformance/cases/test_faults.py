"""Faults: after an error in a capture, an update or another thread, everything else works."""

from __future__ import annotations

import pytest
import torch
from specgraph.capture import BatchDescriptor, GraphRunner
from specgraph.device import Graph, Platform
from specgraph.errors import CaptureError, ReadSetError, SpecgraphError, StaleInputError

from specgraph_conformance.case import case
from specgraph_conformance.draft_rig import DraftRig, make_batches, make_config
from specgraph_conformance.rig import (
    adding,
    assert_usable,
    captured,
    expect_equal,
    expect_refusal,
    in_another_thread,
    on_host,
    replay_and_wait,
)
from specgraph_conformance.tiny_models import make_head


class Failure(Exception):
    """Raised on purpose by captured code."""


class FailingHead:
    """A head that fails in its n-th pass. The two passes in which a drafter checks shapes before it captures don't
    count."""

    pair_input = None

    def __init__(self, head: object, passes: int) -> None:
        self.head, self.left = head, passes + 2

    def __getattr__(self, name: str) -> object:
        return getattr(self.head, name)

    def forward(self, *args: object) -> object:
        """Count down, and fail at the end."""
        self.left -= 1
        if self.left < 0:
            raise Failure
        return self.head.forward(*args)  # pyright: ignore


@pytest.mark.parametrize("passes", [0, 1, 2, 5])
@case(
    "faults.drafter-capture-fails",
    "A drafter whose capture fails at any pass leaves the platform usable for another.",
    hazard="capture-left-broken",
    cause="the runner doesn't close what it captured of the failed descriptor",
)
def test_drafter(platform: Platform, passes: int, seed: int) -> None:
    config = make_config(decode="auto")
    head = make_head("eagle", 1, platform.device)
    with pytest.raises(CaptureError, match="Failure"):
        DraftRig(platform, FailingHead(head, passes), config)  # pyright: ignore
    assert_usable(platform)
    made, eager = DraftRig(platform, head, config), DraftRig(platform, head, make_config())
    (batch,) = make_batches(config, head.aux_size, seed, [3])
    expect_equal(made.propose_to_host(batch).token_ids, eager.propose_to_host(batch).token_ids)


@case(
    "faults.memory-runs-out-in-a-capture",
    "An allocation that can't be had in a capture is an error, and smaller graphs can still be captured.",
    hazard="capture-left-broken",
    cause="the allocator's error leaves the pool in recording",
)
def test_out_of_memory(platform: Platform) -> None:
    x = torch.ones(4, device=platform.device)
    platform.synchronize()
    graph = platform.graph()
    with pytest.raises(Exception, match=r".") as caught, graph.capture():
        x.add_(1)
        torch.empty(1 << 46, device=platform.device).fill_(1)
    assert not isinstance(caught.value, AssertionError)
    assert_usable(platform)


@case(
    "faults.second-capture-in-another-thread",
    "A capture in another thread meanwhile works or is refused with a CaptureError; the first one is right.",
    cause="captures of two threads share a pool, a stream or a flag",
)
def test_other_thread(platform: Platform) -> None:
    x, y = torch.ones(16, device=platform.device), torch.ones(16, device=platform.device)
    platform.synchronize()
    graph = platform.graph()

    def other() -> Graph | None:
        second = platform.graph()
        try:
            with torch.no_grad(), second.capture():
                y.mul_(7)
        except CaptureError:
            return None
        return second

    with graph.capture():
        x.mul_(3)
        made = in_another_thread(other)
        x.add_(1)
    graph.replay()
    if made is not None:
        made.replay()
    platform.synchronize()
    assert on_host(x)[0].item() == 4.0
    assert on_host(y)[0].item() == (7.0 if made else 1.0)


@case(
    "faults.eager-work-in-another-thread",
    "Another thread's eager work during a capture runs, and isn't captured.",
    cause="the capture forbids device work in other threads",
)
def test_eager_thread(platform: Platform) -> None:
    x, y = torch.ones(16, device=platform.device), torch.ones(16, device=platform.device)
    platform.synchronize()
    side, graph = platform.stream(), platform.graph()

    def other() -> None:
        with torch.no_grad(), platform.use(side):
            y.add_(1)

    with graph.capture():
        x.mul_(3)
        in_another_thread(other)
    platform.synchronize()
    assert on_host(y)[0].item() == 2.0
    replay_and_wait(platform, graph)
    assert (on_host(x)[0].item(), on_host(y)[0].item()) == (3.0, 2.0)


@case(
    "faults.work-on-another-stream",
    "Work that a thread issues during its capture to a stream that takes no part runs at once or is refused; no replay "
    "has it, and the platform stays usable.",
    cause="the capture takes in what the thread issues, to whatever stream; or the work is dropped without an error",
)
def test_other_stream(platform: Platform) -> None:
    x, y = torch.ones(16, device=platform.device), torch.ones(16, device=platform.device)
    side, graph = platform.stream(), platform.graph()
    platform.synchronize()
    try:
        with graph.capture():
            x.mul_(3)
            with platform.use(side):
                y.add_(1)
    except SpecgraphError:
        platform.synchronize()
    else:
        platform.synchronize()
        assert on_host(y).unique().tolist() == [2.0], "the work did not run"
        for _ in range(2):
            replay_and_wait(platform, graph)
        assert on_host(x).unique().tolist() == [9.0]
        assert on_host(y).unique().tolist() == [2.0], "a replay has work of another stream"
    assert_usable(platform)


@case(
    "faults.replay-in-a-capture-refused",
    "Replaying one graph inside the capture of another is an error or is captured; the platform stays usable.",
    hazard="capture-left-broken",
    cause="a replay inside a capture runs at once, outside of both graphs",
)
def test_replay_in_capture(platform: Platform) -> None:
    x, y = torch.zeros(4, device=platform.device), torch.zeros(4, device=platform.device)
    inner = captured(platform, lambda: x.add_(1), warm_up=False)
    outer = platform.graph()
    try:
        with outer.capture():
            y.add_(1)
            inner.replay()
    except SpecgraphError:
        platform.synchronize()
        assert on_host(x).tolist() == [0.0] * 4
    else:
        platform.synchronize()
        assert on_host(x).tolist() == [0.0] * 4, "the replay ran during the capture"
        replay_and_wait(platform, outer)
        assert on_host(x).tolist() == [1.0] * 4
    assert_usable(platform)


UNGUARDED = {"tensor": 4, "number": 1}
"""Name -> the elements of a tensor that is missing in the read set."""


@pytest.mark.parametrize("what", [*UNGUARDED, "reshaped"])
@case(
    "faults.undeclared-read-refused",
    "A capture that reads an unnamed tensor, of one element too, is refused by an error that names the op, and so is a "
    "replay whose tensor has another shape at the same address; the next capture works.",
    hazard="small-tensor-unguarded",
    cause="the guard doesn't see ops on this device, leaves small tensors out, or compares addresses only",
    quick=True,
)
def test_guard(platform: Platform, what: str) -> None:
    x = torch.zeros(4, 4, device=platform.device)
    named = {"x": x}
    runner = GraphRunner(platform, lambda: named, check_inputs=True)
    descriptor = BatchDescriptor("propose", 1, 1, 1)
    if what in UNGUARDED:
        other = torch.ones(UNGUARDED[what], device=platform.device)
        expect_refusal(
            lambda: runner.capture(descriptor, adding(x, other)), f"an unnamed {what}", "add", (ReadSetError,)
        )
        assert_usable(platform)
    runner.capture(descriptor, adding(x, 1))
    named["x"] = x.view(2, 8)
    expect_refusal(lambda: runner.replay(descriptor), "a replay of another shape", "", (StaleInputError,))
    runner.close()
