"""Attention over the KV caches of several layers, with queries, block tables and contexts of several kinds."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from specgraph.ops.triton.launch import AttentionShape

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 16
ROWS = {"draft": 1, "verify": 6, "block": 16, "tree": 16, "prompt": 512}
"""Rows per request of the kinds of attention that are timed."""
COPIED_BYTES = 600 << 20
"""Keys and values of all layers together, about: more than any cache of a GPU holds."""


class Problem:
    """One attention over the caches of several layers."""

    def __init__(
        self, kind: str, requests: int, contexts: str, device: torch.device, layers: int | None = None
    ) -> None:
        lengths, longest = contexts_of(contexts, requests)
        used = [-(-n // BLOCK) for n in lengths]
        self.kind, self.lengths, self.rows = kind, lengths, ROWS[kind]
        self.dtype = torch.float8_e4m3fn if contexts == "fp8" else torch.bfloat16
        self.bytes = sum(lengths) * KV_HEADS * DIM * 2 * self.dtype.itemsize
        self.layers = layers or min(64, max(4, -(-COPIED_BYTES // self.bytes)))
        g = torch.Generator(device).manual_seed(0)

        def make(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, device=device).bfloat16()

        blocks = sum(used) + 1, BLOCK, KV_HEADS, DIM
        self.caches = [[make(*blocks).to(self.dtype) for _ in range(2)] for _ in range(self.layers)]
        width = -(-longest // BLOCK // 16) * 16
        order = iter((torch.randperm(sum(used), generator=torch.Generator().manual_seed(0)) + 1).tolist())
        table = [[next(order) for _ in range(n)] + [0] * (width - n) for n in used]
        rows = requests * self.rows
        self.new = make(rows, HEADS + 2 * KV_HEADS, DIM).split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        self.query = self.new[0].contiguous()
        self.table = torch.tensor(table, dtype=torch.int32, device=device)
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.starts = torch.arange(0, rows + 1, self.rows, dtype=torch.int32, device=device)
        self.rotary = torch.randn(longest, DIM, device=device)
        self.positions = self.seq_lens.long() - 1
        self.slots = (
            self.table.gather(1, self.positions[:, None] // BLOCK)[:, 0].long() * BLOCK + self.positions % BLOCK
        )
        self.ancestors = (2 << (torch.arange(rows, device=device) % 16)) - 1  # each row a child of the one before

    def shape(self, units: int) -> AttentionShape:
        """What a tile is chosen by."""
        return AttentionShape(
            rows=self.rows * HEADS // KV_HEADS, pairs=len(self.lengths) * KV_HEADS, context=self.table.shape[1] * BLOCK,
            head_dim=DIM, itemsize=2, cache_itemsize=self.dtype.itemsize, compute_units=units,
        )  # fmt: skip

    def call(self, ops: Any, layer: int) -> Tensor:
        """Attend over one layer's cache."""
        where, options = (*self.caches[layer], self.table, self.seq_lens), {"scale": DIM**-0.5}
        if self.kind == "draft":
            new = *self.new, self.rotary, self.positions, self.slots
            return ops.rotate_store_attend(*new, *where, self.starts, query_len=1, **options)
        if self.kind == "tree":
            return ops.tree_attention(self.query, *where, self.ancestors, tree_len=16, **options)
        causal = self.kind != "block"
        return ops.paged_attention(self.query, *where, self.starts, query_len=self.rows, causal=causal, **options)


def contexts_of(name: str, requests: int) -> tuple[list[int], int]:
    """Contexts of the requests, and what their block tables have room for."""
    if name == "uneven":
        lengths = [200 + 3800 * i // max(requests - 1, 1) for i in range(requests)]
        random.Random(1).shuffle(lengths)
        return lengths, 4096
    length, longest = {
        "even": (1024, 1280), "fp8": (1024, 1280), "wide": (1024, 4096), "wider": (1100, 4096), "widest": (1024, 16384),
        "long": (32768, 32768),
    }[name]  # fmt: skip
    return [length] * requests, longest
