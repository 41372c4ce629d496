"""Collectives inside graphs, where the platform claims them. One process: what is tested is capture, not a network."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from specgraph.platforms import Platform

from specgraph_conformance.case import case
from specgraph_conformance.rig import captured, expect_equal, on_host

NEEDS = ("collectives_in_graph",)


@pytest.fixture
def group(platform: Platform) -> Iterator[None]:
    """A process group of one, over the device's own communication library."""
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group(dist.get_default_backend_for_device(platform.device), store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


@pytest.mark.parametrize("count", [1, 2, 8])
@case(
    "collectives.chain-in-one-graph",
    "A chain of all-reduces between dependent ops in one graph gives what eager gives, at every replay.",
    hazard="merged-chain-collectives",
    cause="the barrier state of one collective is baked into the next: don't claim merged loops with collectives",
    needs=NEEDS,
)
def test_chain(platform: Platform, group: None, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, out = torch.zeros(8, 64, device=platform.device), torch.zeros(8, 64, device=platform.device)
    w = (torch.randn(64, 64, generator=generator) / 8).to(platform.device)

    def chain() -> torch.Tensor:
        y = x
        for _ in range(count):
            y = torch.tanh(y @ w)
            dist.all_reduce(y)
        return y

    chain()
    platform.synchronize()
    graph = captured(platform, lambda: out.copy_(chain()))
    for _ in range(5):
        x.copy_(torch.randn(8, 64, generator=generator))
        graph.replay()
        platform.synchronize()
        expect_equal(on_host(out), on_host(chain()))
    graph.close()


@case(
    "collectives.gather-in-graph",
    "An all-gather in a graph gives what eager gives.",
    hazard="merged-chain-collectives",
    cause="the communication library allocates or synchronises in the capture",
    needs=NEEDS,
)
def test_gather(platform: Platform, group: None) -> None:
    x, out = torch.zeros(64, device=platform.device), torch.zeros(64, device=platform.device)
    graph = captured(platform, lambda: dist.all_gather_into_tensor(out, x * 2))
    x.fill_(3)
    graph.replay()
    platform.synchronize()
    assert on_host(out).unique().tolist() == [6.0]
    graph.close()
