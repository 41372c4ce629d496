"""exec-budget: too many live graphs are refused early and clearly."""

from __future__ import annotations

import gc

import pytest
import torch
from device_memory import live
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
    assert musa.capabilities.max_live_graphs == 1900 < simulated.machine.max_live_graphs
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


def test_without_the_budget_the_runtime_fails_late(musa):
    """exec-budget, put back: the runtime's own limit is met when the capture ends."""
    simulated.machine.max_live_graphs = live(musa) + 2
    x, graphs = torch.ones(2, device=musa.device), [musa.graph() for _ in range(3)]
    with pytest.raises(CaptureError, match=r"the capture failed.*illegal memory access"):
        for graph in graphs:
            with graph.capture():
                x + 1
    for graph in graphs:
        graph.close()


def test_graphs_without_an_executable_do_not_count(musa):
    """Reset ones, failed ones, and new ones."""
    platform, x = MusaPlatform(0, Policy(max_live_graphs=live(musa) + 2), found=FOUND), torch.ones(2)
    held = [musa.musa.MUSAGraph() for _ in range(4)]
    graphs = [platform.graph() for _ in range(3)]
    for graph in graphs:
        with pytest.raises(ZeroDivisionError), graph.capture():
            x / (1 // 0)
        with graph.capture():
            x + 1
        if graph is not graphs[-1]:
            raw = graph._raw
            graph.reset()
            held.append(raw)
    graphs[-1].close()
    assert len(held) == 6


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
