"""One attention pass over random rows and caches, compared with float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from specgraph.attention import (
    NULL_SLOT,
    AttentionLayer,
    AttentionMetadata,
    HostLengths,
    KVCache,
    StepContext,
)
from specgraph.device import Platform
from specgraph.errors import UnsupportedError
from specgraph.models.config import RotaryConfig
from specgraph.models.rotary import rotary_table
from torch import Tensor

from specgraph_conformance import oracles
from specgraph_conformance.case import Absent
from specgraph_conformance.rig import AttentionShape, attention_backend, expect_close, on_host, supported_shape

TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
POSITIONS = 2048
"""Rows of the rotary table, unless a request has more keys."""


@dataclass
class Rows:
    """Requests with given numbers of rows and keys over a cache of random values, and their float64 result."""

    platform: Platform
    attention: str
    query_lens: Sequence[int]
    seq_lens: Sequence[int]
    """Keys of each request, its own rows included; 0 for an inert one."""
    heads: tuple[int, int] = (4, 2)
    dim: int = 64
    block: int = 16
    dtype: torch.dtype = torch.float32
    causal: bool = True
    rotary: bool = True
    poison: bool = False
    """Fill blocks of no request with NaN."""
    poison_tail: bool = False
    """Fill the slots behind each request's last key, in its own last block, with NaN."""
    strided: bool = False
    seed: int = 0
    gain: float = 1.0
    """Factor of the queries: scores have a standard deviation of about this."""
    window: int | None = None
    """See `AttentionLayer.window`."""
    sinks: Tensor | None = None
    """See `AttentionLayer.sinks`; in host memory."""
    scale: float | None = None
    """See `AttentionLayer.scale`; dim ** -0.5 by default."""
    spare_blocks: int = 0
    """Blocks of no request between every second block of the requests and the others."""
    metadata: AttentionMetadata = field(init=False)

    def __post_init__(self) -> None:
        backend = attention_backend(self.platform, self.attention)
        shape = supported_shape(backend, self.heads, AttentionShape(self.dtype, self.dim, self.block))
        self.dtype, self.dim, self.block = shape.dtype, shape.dim, shape.block
        device, generator = self.platform.device, torch.Generator().manual_seed(self.seed)
        num_heads, kv_heads = self.heads

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(self.dtype)

        table = (
            rotary_table(RotaryConfig(), max(POSITIONS, *self.seq_lens), self.dim, torch.device("cpu"))
            if self.rotary
            else None
        )
        scale = self.dim**-0.5 if self.scale is None else self.scale
        self.layer_on_host = AttentionLayer(num_heads, kv_heads, self.dim, scale, table, self.causal)
        on_device = None if table is None else table.to(device)
        self.layer = AttentionLayer(
            num_heads,
            kv_heads,
            self.dim,
            scale,
            on_device,
            self.causal,
            self.window,
            None if self.sinks is None else self.sinks.to(device),
        )
        width = max(-(-n // self.block) for n in self.seq_lens) + 1
        order = (torch.randperm(len(self.seq_lens) * width, generator=generator) + 1).tolist()
        order = [block + self.spare_blocks * (block % 2) for block in order]
        self.blocks = [[order.pop() for _ in range(-(-n // self.block))] for n in self.seq_lens]
        used = {block for row in self.blocks for block in row}
        total = 1 + len(self.seq_lens) * width + self.spare_blocks
        self.key_cache, self.value_cache = (random(total, self.block, kv_heads, self.dim) for _ in range(2))
        for cache in (self.key_cache, self.value_cache):
            cache[0] = 0
            if self.poison:
                cache[[b for b in range(1, total) if b not in used]] = torch.nan
            for row, length in zip(self.blocks, self.seq_lens, strict=True):
                if self.poison_tail and length % self.block:
                    cache[row[-1], length % self.block :] = torch.nan
        rows = sum(self.query_lens)
        packed = random(rows, num_heads + 2 * kv_heads, self.dim)
        packed[:, :num_heads] *= self.gain
        self.query, self.key, self.value = packed.split((num_heads, kv_heads, kv_heads), dim=1)
        query, key, value = packed.to(device).split((num_heads, kv_heads, kv_heads), dim=1)
        self.device_rows = query, key, value
        if not self.strided:
            self.device_rows = query.contiguous(), key.contiguous(), value.contiguous()
        positions, slots = [], []
        for row, (query_len, seq_len) in enumerate(zip(self.query_lens, self.seq_lens, strict=True)):
            for i in range(query_len):
                position = seq_len - query_len + i if seq_len else 0
                positions.append(position)
                blocks = self.blocks[row]
                slot = blocks[position // self.block] * self.block + position % self.block if seq_len else NULL_SLOT
                slots.append(slot)
        table_rows = [row + [0] * (width - len(row)) for row in self.blocks]
        starts = torch.tensor([0, *self.query_lens]).cumsum(0)
        self.metadata = AttentionMetadata(
            query_start_loc=starts.int().to(device),
            seq_lens=torch.tensor(self.seq_lens, dtype=torch.int32, device=device),
            positions=torch.tensor(positions, device=device),
            slot_mapping=torch.tensor(slots, device=device),
            block_table=torch.tensor(table_rows, dtype=torch.int32, device=device),
            query_len=max(self.query_lens),
        )
        self.positions, self.slots = positions, slots
        self.cache = KVCache(self.key_cache.to(device), self.value_cache.to(device))

    def forward(self) -> Tensor:
        """Run the backend eagerly; the output stays on the device."""
        backend = attention_backend(self.platform, self.attention)
        lengths = HostLengths(list(self.query_lens), list(self.seq_lens))
        context = StepContext(self.metadata, 0, lengths if backend.host_parameters else None)
        try:
            return backend.forward(self.layer, 0, *self.device_rows, self.cache, context)
        except UnsupportedError as error:
            raise Absent(f"attention '{self.attention}': {error}") from error

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        """(output, key cache, value cache) in float64."""
        table, positions = self.layer_on_host.rotary, torch.tensor(self.positions)
        keys, values = self.key_cache.double(), self.value_cache.double()
        query = oracles.rotate(self.query.double(), table, positions)
        key = oracles.rotate(self.key.double(), table, positions)
        out, row = torch.zeros_like(query), 0
        for slot, k, v in zip(self.slots, key, self.value.double(), strict=True):
            if slot != NULL_SLOT:
                keys[slot // self.block, slot % self.block] = k
                values[slot // self.block, slot % self.block] = v
        for query_len, seq_len, blocks in zip(self.query_lens, self.seq_lens, self.blocks, strict=True):
            if query_len and seq_len:
                k, v = (oracles.gather_request(cache, blocks, seq_len) for cache in (keys, values))
                rows = query[row : row + query_len]
                out[row : row + query_len] = oracles.attention(
                    rows, k, v, self.layer.scale, self.causal, self.window, self.sinks
                )
            row += query_len
        return out, keys, values

    def check(self, forward: Callable[[Rows], Tensor] | None = None) -> None:
        """Output within the dtype's tolerance; caches written where they should be, and bit for bit nowhere else.

        Args:
            forward: runs the pass; the attention backend's by default.
        """
        out, keys, values = self.expected()
        tolerance = TOLERANCE[self.dtype]
        seen = on_host(self.forward() if forward is None else forward(self)).double()
        row = 0
        for number, (query_len, seq_len) in enumerate(zip(self.query_lens, self.seq_lens, strict=True)):
            mine = slice(row, row + query_len)
            what = f"output of request {number} of {len(self.seq_lens)} ({query_len} rows, {seq_len} keys)"
            expect_close(seen[mine], out[mine], tolerance, what)
            row += query_len
        assert seen.shape == out.shape
        written = [slot for slot in self.slots if slot != NULL_SLOT]
        others = [slot for slot in range(self.block, keys.shape[0] * self.block) if slot not in set(written)]
        for name, now, before, wanted in (
            ("keys", on_host(self.cache.key), self.key_cache, keys),
            ("values", on_host(self.cache.value), self.value_cache, values),
        ):
            now, before, wanted = (t.flatten(0, 1) for t in (now, before, wanted))
            expect_close(now[written], wanted[written], tolerance, f"{name} of the pass's rows in the cache")
            same = (now[others] == before[others]) | (now[others].isnan() & before[others].isnan())
            assert same.all(), f"{name} were written where no row has a slot"
