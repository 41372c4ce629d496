"""Parts of attention, added up, against `paged_attention` over all keys."""

from __future__ import annotations

import pytest
import torch

from specgraph import ops
from specgraph.attention.context_parallel import lengths_by_row
from specgraph.ops import DeviceLengths, HostLengths, KVCache, Mask, context_parallel
from specgraph.parallel import ContextParallel

BLOCK, BLOCKS, HEADS, KV_HEADS, DIM = 8, 13, 4, 2, 6


def problem(rows: int, seed: int) -> tuple[torch.Tensor, KVCache, torch.Tensor]:
    """Queries of three requests, whole caches, block tables; cells that no request owns hold NaN."""
    g = torch.Generator().manual_seed(seed)
    cache = torch.randn(2, BLOCKS, BLOCK, KV_HEADS, DIM, generator=g, dtype=torch.float64)
    table = torch.randperm(BLOCKS - 1, generator=g)[:12].view(3, 4).int() + 1
    query = torch.randn(3 * rows, HEADS, DIM, generator=g, dtype=torch.float64)
    return query, KVCache(*cache), table


def own(cache: KVCache, rank: int, ranks: int) -> KVCache:
    return KVCache(*(part[:, rank::ranks].contiguous() for part in cache))


MASKS = {
    "causal": Mask(),
    "all": Mask(causal=False),
    "window": Mask(window=5),
    "sinks": Mask(window=9, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    "tree": Mask(causal=False, ancestors=torch.tensor([1, 3, 5, 13] * 3), tree_len=4),
}


@pytest.mark.parametrize(("ranks", "memory"), [(2, None), (4, None), (4, 1)])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_the_sum_of_the_parts_is_attention_over_all_keys(mask, ranks, memory, monkeypatch):
    """With memory for all keys, and for those of one block."""
    if memory is not None:
        monkeypatch.setattr(context_parallel, "GATHER_BYTES", memory)
    query, cache, table = problem(4, seed=ranks)
    for seq_lens in ([9, 4, 31], [4, 0, 17], [32, 5, 6]):
        lengths = DeviceLengths(torch.tensor(seq_lens, dtype=torch.int32), torch.tensor([0, 4, 8, 12]), 4)
        whole = ops.paged_attention.reference(query, cache, table, lengths, mask, scale=0.4)
        parts = [
            ops.attend_part(query, own(cache, r, ranks), table, lengths, mask, r, ranks, scale=0.4)
            for r in range(ranks)
        ]
        found = ops.sum_parts(torch.cat(parts), ranks, 1, 3)
        torch.testing.assert_close(found, whole[:, 1:], atol=1e-6 if mask.has_window_or_sinks else 1e-12, rtol=0)


@pytest.mark.parametrize("causal", [True, False])
def test_host_lengths_are_those_of_each_row(causal):
    """With ranks that hold none of the keys of a row, too."""
    query, cache, table = problem(4, seed=9)
    lengths, ranks = HostLengths([4, 4, 4], [5, 4, 30]), 8
    device = DeviceLengths(torch.tensor([5, 4, 30], dtype=torch.int32), torch.tensor([0, 4, 8, 12]), 4)
    for rank in range(ranks):
        part = ops.attend_part(query, own(cache, rank, ranks), table, device, Mask(causal), rank, ranks, scale=0.4)
        out = torch.full_like(part, float("nan"))
        seen = lengths_by_row(lengths, causal, ContextParallel(rank, ranks, "")).seq_lens
        assert seen == [len(range(rank, keys, ranks)) for keys in lengths_by_row(lengths, causal).seq_lens]
        by_row = table.repeat_interleave(4, 0)
        ops.attend_part_host(query, own(cache, rank, ranks), by_row, seen, scale=0.4, out=out)
        torch.testing.assert_close(out, part, atol=1e-12, rtol=0)
