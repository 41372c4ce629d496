"""Sliding windows and attention sinks through the fused ops, captured and updated, against the core's op on the cpu."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from specgraph_npu.attention import make_attention

from specgraph.attention import (
    AttentionLayer,
    AttentionMetadata,
    ForwardContext,
    HostLengths,
    KVCache,
    PagedAttention,
)
from specgraph.capture import UpdatePlan

HEADS, KV_HEADS, DIM, BLOCK, WIDTH = 4, 2, 128, 128, 3
TOLERANCE = {"atol": 2**-6, "rtol": 2**-6}
"""Outputs are bfloat16."""

pytestmark = pytest.mark.usefixtures("all_limits")


def metadata(rows: int, seq_lens: list[int], device: torch.device) -> AttentionMetadata:
    """Requests of `rows` rows each, the last ones of their sequences; block tables in order."""
    requests = len(seq_lens)
    starts = [max(n - rows, 0) for n in seq_lens]
    positions = torch.tensor([start + i for start in starts for i in range(rows)])
    table = torch.arange(1, requests * WIDTH + 1).view(requests, WIDTH)
    slots = [
        int(table[r, (start + i) // BLOCK]) * BLOCK + (start + i) % BLOCK if seq_lens[r] else -1
        for r, start in enumerate(starts)
        for i in range(rows)
    ]
    return AttentionMetadata(
        torch.tensor([0, *accumulate([rows] * requests)], dtype=torch.int32, device=device),
        torch.tensor(seq_lens, dtype=torch.int32, device=device),
        positions.to(device),
        torch.tensor(slots, device=device),
        table.int().to(device),
        rows,
    )


@pytest.mark.parametrize("name", ["fia", "fia-v2"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("window", "sinks"), [(1, False), (5, False), (130, False), (5, True), (None, True)])
def test_windows_and_sinks(npu, runtime, name, rows, window, sinks):
    g = torch.Generator().manual_seed(rows)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g).bfloat16()

    sink = random(HEADS) if sinks else None
    attention = make_attention(npu, name)
    layer = AttentionLayer(HEADS, KV_HEADS, DIM, DIM**-0.5, window=window, sinks=sink)
    if sinks and name == "fia":
        assert "'fia-v2' does" in attention.supports(layer, torch.bfloat16, BLOCK).reason
        return
    assert attention.supports(layer, torch.bfloat16, BLOCK)
    there = AttentionLayer(HEADS, KV_HEADS, DIM, DIM**-0.5, window=window, sinks=None if sink is None else sink.npu())
    host = [random(4 * rows, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    caches = [random(4 * WIDTH + 1, BLOCK, KV_HEADS, DIM) for _ in range(2)]
    device, cache = [each.npu() for each in host], KVCache(*(each.npu() for each in caches))
    lengths = [[4, 129, 300, 0], [384, 0, 3, 128], [7, 256, 0, 131]]
    named = metadata(rows, lengths[0], npu.device)
    plan, graph = UpdatePlan(npu, 4), npu.graph()
    attention.named_tensors()
    with torch.inference_mode():
        npu.synchronize()
        with graph.capture():
            out = attention.forward(
                there, 0, *device, cache, ForwardContext(named, 0, HostLengths([rows] * 4, lengths[0]), plan)
            )
        for seq_lens in lengths:
            now = metadata(rows, seq_lens, torch.device("cpu"))
            for mine, theirs in zip(named.named_tensors("m").values(), now.named_tensors("m").values(), strict=True):
                mine.copy_(theirs)
            graph.replay()
            plan.apply_in_order({0: HostLengths([rows] * 4, seq_lens)})
            expected = PagedAttention().forward(layer, 0, *host, KVCache(*caches), ForwardContext(now))
            torch.testing.assert_close(out.cpu().float(), expected.float(), **TOLERANCE)
    graph.close()
