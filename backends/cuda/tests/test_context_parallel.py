"""Attention over a rank's part of the keys in Triton, and the sum of the parts, against float64 over all keys.

With TRITON_INTERPRET=1 the tests also run without a GPU.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from interpreted import DEVICE, INTERPRETED, device
from specgraph_conformance.attention_rows import Rows
from specgraph_cuda.kernels import attention_for
from torch import Tensor
from torch.utils._pytree import tree_map_only

from specgraph import ops as kernels
from specgraph.kernels.attention import AttentionOps
from specgraph.kernels.launch import AttentionTile, LaunchOptions
from specgraph.ops import KVCache, Mask

__all__ = ["device"]  # the fixture

CASES = [
    # ranks, block size, rows per request, lengths of all keys, heads, kv heads, head dim, tile
    (2, 16, 1, [0, 1, 2, 33, 130], 4, 2, 32, AttentionTile(16, 16, 4, span=32)),
    (4, 16, 4, [4, 0, 130], 4, 1, 32, AttentionTile(16, 16, 4)),
    (4, 16, 6, [6, 70, 0], 4, 2, 48, None),
    (2, 16, 1, [0, 1, 33, 2050], 16, 1, 576, None),
    (2, 16, 6, [6, 0, 1030], 16, 1, 576, None),
]
MASKS = {"causal": Mask(), "all": Mask(causal=False), "tree": Mask(causal=False)}


def with_ancestors(mask: Mask, rows: int, count: int) -> Mask:
    """Row i of each request sees rows 0, i and every second one before i."""
    words = torch.tensor([1 | (1 << i) | (0x5555 & ((1 << i) - 1)) for i in range(rows)] * count)
    return mask._replace(ancestors=words, tree_len=rows)


def of_rank(cache: KVCache, rank: int, ranks: int) -> KVCache:
    return KVCache(*(part[:, rank::ranks].contiguous() for part in cache))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"n{c[0]}q{c[2]}h{c[4]}")
def test_parts_add_up_to_attention_over_all_keys(case: tuple, kind: str, dtype: torch.dtype) -> None:
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter has no bfloat16 arithmetic")
    ranks, block, count, seq_lens, heads, kv_heads, dim, tile = case
    if dim > 256 and dtype == torch.float32:
        pytest.skip("latents have tiles in 2 bytes per element")
    made = Rows(
        torch.Generator().manual_seed(ranks), [count] * len(seq_lens), seq_lens, (heads, kv_heads), dim, block, dtype,
        poison=True, poison_tail=True, strided=True,
    )  # fmt: skip
    mask = with_ancestors(MASKS[kind], count, len(seq_lens)) if kind == "tree" else MASKS[kind]
    options = LaunchOptions(attention=attention_for, most_head_dim=576, compute_units=132)
    if tile is not None:
        options = replace(options, attention=lambda shape: tile)
    launched = AttentionOps(options)
    placed = made.table, made.lengths, mask
    wide = KVCache(*(part.double() for part in made.cache))
    want = kernels.paged_attention.reference(made.query.double(), wide, *placed, scale=made.factor)
    given = tree_map_only(Tensor, lambda t: t.to(DEVICE), (made.query, made.cache, *placed))
    parts = []
    for rank in range(ranks):
        query, cache, *rest = given
        parts.append(launched.attend_part(query, of_rank(cache, rank, ranks), *rest, rank, ranks, scale=made.factor))
        for row, length in enumerate(seq_lens):
            if length <= rank and kind != "causal":  # this rank holds no key of the request
                mine = parts[-1][row * count : (row + 1) * count]
                assert bool((mine[..., -1] == float("-inf")).all())
                assert bool((mine[..., :-1] == 0).all())
    near = 2e-2 if dtype == torch.bfloat16 else 2e-5
    for first in (0, heads // 2):
        found = launched.sum_parts(torch.cat(parts), ranks, first, heads // 2).cpu()
        torch.testing.assert_close(found.double(), want[:, first : first + heads // 2], rtol=near, atol=near)


def test_windows_sinks_and_wide_heads_run_on_torch_ops(caplog: pytest.LogCaptureFixture) -> None:
    """Latents, of 576 elements, have a kernel in 2 bytes per element, and where shared memory holds its tiles."""
    launched = AttentionOps(LaunchOptions())
    for mask, dim in ((Mask(window=4), 64), (Mask(sinks=torch.zeros(4)), 64), (Mask(), 576)):
        made = Rows(torch.Generator().manual_seed(0), [1], [9], (4, 1), dim)
        given = made.query, of_rank(made.cache, 0, 2), made.table, made.lengths, mask
        assert launched.attend_part(*given, 0, 2, scale=0.1) is NotImplemented
    assert "head_dim is 576" in caplog.text
