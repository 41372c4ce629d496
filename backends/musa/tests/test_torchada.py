"""torchada, which every engine on MUSA loads: torch.cuda means torch.musa, and executables of graphs are rotated.

`pytest -p torch_musa -p torchada` loads it before any test; without it these are skipped.
"""

from __future__ import annotations

import sys

import pytest
import torch
from device_memory import live
from specgraph.device import discover, select_platform
from specgraph.errors import CaptureError

from specgraph_musa.backend import specgraph_backend
from specgraph_musa.platform import MusaPlatform
from specgraph_musa.policy import Policy
from torch_musa.graphs import MUSAGraph

pytestmark = pytest.mark.skipif("torchada" not in sys.modules, reason="torchada is not loaded")


def test_torch_cuda_is_this_device_and_musa_is_chosen():
    assert torch.cuda.CUDAGraph is MUSAGraph
    found = dict(discover())
    assert not found["cuda"].probe().available
    found["musa"] = type(found["cpu"])("musa", "specgraph-musa", "0.1.0", specgraph_backend())
    assert select_platform(None, found, {}).name == "musa"


def test_rotation_makes_more_graphs_legal_than_the_budget(musa, monkeypatch):
    platform = MusaPlatform(0, Policy(max_live_graphs=live(musa) + 2))
    assert platform.capabilities.max_live_graphs is None
    x, graphs = torch.ones(2, device=platform.device), [platform.graph() for _ in range(4)]
    results = []
    for graph in graphs:
        with graph.capture():
            results.append(x * 3)
    x.fill_(5)
    for graph in graphs:
        graph.replay()
    assert [y.tolist() for y in results] == [[15.0, 15.0]] * 4
    graphs[0].reset()
    stats = sys.modules["torchada._graph_rotation"].stats
    monkeypatch.setattr("torchada._graph_rotation.stats", lambda: stats() | {"aux_failed": True})
    with pytest.raises(CaptureError, match="the budget is"), graphs[0].capture():
        x + 1  # it can't rotate: its extension was not built
    for graph in graphs:
        graph.close()
