"""exec-budget: too many live graphs are refused early and clearly."""

from __future__ import annotations

import gc

import pytest
import torch
from device_memory import live, reserved
from draft.on_platform import make_drafter
from specgraph.errors import CaptureError

from specgraph_musa.platform import MusaPlatform
from specgraph_musa.policy import Policy
from specgraph_musa.trials import TRIALS
from torch_musa import simulated

FOUND = dict.fromkeys(TRIALS, "") | {
    "release": "by_own_call" if simulated.machine.release == "2.7.1" else "by_reset",
    "triton": "not tried",
}
"""The findings of trials on a sound device, without running them."""


def test_a_capture_over_the_budget_says_what_to_do(musa):
    platform = MusaPlatform(0, Policy(max_live_graphs=live(musa) + 3))
    graphs = [platform.graph() for _ in range(4)]
    x = torch.ones(2, device=platform.device)
    for graph in graphs[:3]:
        with graph.capture():
            x + 1
    message = r"holds \d+ MUSA graphs, and the budget is \d+.*name fewer capture sizes"
    with pytest.raises(CaptureError, match=message), graphs[3].capture():
        x + 1
    graphs[0].close()
    with graphs[3].capture():
        y = x + 1
    graphs[3].replay()
    assert y.tolist() == [2.0, 2.0]
    for graph in graphs:
        graph.close()
    assert live(musa) <= platform.policy.max_live_graphs


def test_the_budget_is_below_what_the_runtime_takes(musa):
    assert musa.capabilities.max_live_graphs == 1900 < simulated.defects.max_live_graphs


def test_a_drafter_over_the_budget_fails_at_start_up(musa):
    gc.collect()
    before = live(musa)
    drafter = make_drafter(musa, "step", 3)
    needed = live(musa) - before
    drafter.close()
    del drafter
    gc.collect()
    tight = MusaPlatform(0, Policy(max_live_graphs=live(musa) + needed - 1))
    with pytest.raises(CaptureError, match="name fewer capture sizes"):
        make_drafter(tight, "step", 3)
    gc.collect()
    enough = MusaPlatform(0, Policy(max_live_graphs=live(musa) + needed))
    make_drafter(enough, "step", 3).close()
    make_drafter(tight, "step", 3, capture_sizes=[5]).close()


def test_without_the_budget_the_runtime_fails_late(musa):
    """exec-budget, put back: the runtime's own limit, met at instantiation, is a CaptureError too and leaks nothing."""
    simulated.defects.max_live_graphs = 2
    x, held = torch.ones(2, device=musa.device), []
    for _ in range(3):
        graphs = [musa.graph() for _ in range(4)]
        with pytest.raises(CaptureError, match="holds no more graphs"):
            for graph in graphs:
                with graph.capture():
                    x + 1
        for graph in graphs:
            graph.close()
        held.append(reserved(musa))
    assert held == held[:1] * 3
    simulated.restore()
    graph = musa.graph()
    with graph.capture():
        y = x + 1
    graph.replay()
    assert y.tolist() == [2.0, 2.0]
    graph.close()


def test_graphs_in_reference_cycles_are_collected_before_a_capture_is_refused(musa):
    platform = MusaPlatform(0, Policy(max_live_graphs=live(musa) + 1), found=FOUND)
    cycle, x = [platform.graph()], torch.ones(2, device=platform.device)
    gc.disable()  # no collection of Python's own in between
    try:
        with cycle[0].capture():
            x + 1
        cycle.append(cycle)
        del cycle
        graph = platform.graph()
        with graph.capture():
            x + 1
    finally:
        gc.enable()
    graph.close()
