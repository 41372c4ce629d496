"""The graph runner with attention whose lengths are host parameters, on the `cpu` platform."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from specgraph import ops
from specgraph.attention import HostLengths, TaskKey
from specgraph.capture import BatchDescriptor, GraphRunner, Recording
from specgraph.cpu.platform import CpuPlatform
from specgraph.errors import UpdateError

REQUESTS, LAYERS = 2, 2


@dataclass
class HostAttention:
    """Two "layers" of attention with host lengths over one cache."""

    platform: CpuPlatform
    named: dict[str, Tensor]

    def attend(self, lengths: HostLengths, layer: int, out: Tensor) -> None:
        n = self.named
        cache = ops.KVCache(n["keys"], n["values"])
        ops.paged_attention_host(n["query"], cache, n["table"], lengths, ops.Mask(), scale=layer + 1.0, out=out)

    def body(self, recording: Recording | None) -> None:
        for layer in range(LAYERS):
            out = self.named["out"][layer]
            inert = HostLengths([1] * REQUESTS, [0] * REQUESTS)

            def rewrite(lengths: HostLengths, layer=layer, out=out) -> None:
                self.attend(lengths, layer, out)

            if recording is None:
                rewrite(inert)
            else:
                with self.platform.task_group() as group:
                    rewrite(inert)
                recording.updates.add(TaskKey(0, layer), group, lambda lengths, run=rewrite: partial(run, lengths))


@pytest.fixture
def host_attention(platform) -> HostAttention:
    g = torch.Generator().manual_seed(1)
    named = {
        "query": torch.randn(REQUESTS, 4, 8, generator=g),
        "keys": torch.randn(5, 4, 2, 8, generator=g),
        "values": torch.randn(5, 4, 2, 8, generator=g),
        "table": torch.tensor([[1, 2], [3, 4]], dtype=torch.int32),
        "out": torch.zeros(LAYERS, REQUESTS, 4, 8),
    }
    return HostAttention(platform, named)


def test_host_lengths_reach_the_captured_ops(platform, host_attention):
    runner = GraphRunner(platform, lambda: host_attention.named)
    key = BatchDescriptor("step", REQUESTS, 1, 3)
    runner.capture(key, host_attention.body)
    for seq_lens in ([3, 8], [4, 0], [1, 5]):
        lengths = HostLengths([1] * REQUESTS, seq_lens)
        runner.replay(key, {0: lengths})
        wanted = torch.empty_like(host_attention.named["out"])
        for layer in range(LAYERS):
            host_attention.attend(lengths, layer, wanted[layer])
        assert torch.equal(host_attention.named["out"], wanted)
        assert wanted.abs().sum() > 0


@pytest.mark.parametrize(
    "lengths",
    [None, {}, {1: HostLengths([1, 1], [2, 2])}, {0: HostLengths([1, 1], [2])}, {0: HostLengths([1, 1], [2, -1])}],
)
def test_wrong_lengths_launch_nothing_and_the_graph_stays_good(platform, host_attention, lengths):
    runner = GraphRunner(platform, lambda: host_attention.named)
    key = BatchDescriptor("step", REQUESTS, 1, 3)
    runner.capture(key, host_attention.body)
    host_attention.named["out"].fill_(-9)
    with pytest.raises(UpdateError):
        runner.replay(key, lengths)
    assert (host_attention.named["out"] == -9).all()
    runner.replay(key, {0: HostLengths([1, 1], [2, 2])})
    assert (host_attention.named["out"] != -9).all()
