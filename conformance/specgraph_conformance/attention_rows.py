"""The rows of one pass over a paged KV cache of random values, and their attention in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from specgraph import ops
from specgraph.attention import NULL_SLOT, AttentionLayer, AttentionMetadata, ForwardContext
from specgraph.device import Platform
from specgraph.errors import UnsupportedError
from specgraph.ops import DeviceLengths, HostLengths, KVCache, Mask, NewRows
from specgraph_models.config import RotaryConfig
from specgraph_models.rotary import rotary_table
from torch import Tensor

from specgraph_conformance import oracles
from specgraph_conformance.case import Absent
from specgraph_conformance.op_run import run_on
from specgraph_conformance.op_table import Run
from specgraph_conformance.rig import AttentionShape, attention_backend, expect_close, supported_shape

TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
POSITIONS = 2048
"""The rows of the rotary table. If a request has more keys, the table has a row for each of them."""
FP8 = torch.float8_e4m3fn
CAUSAL = Mask()

Attend = Callable[..., Tensor]
"""A function with the arguments of `ops.paged_attention`."""


@dataclass
class Rows:
    """Requests with given numbers of rows and keys, in host memory."""

    g: torch.Generator
    query_lens: Sequence[int]
    seq_lens: Sequence[int]
    """The keys of each request, including its own rows. 0 for an inert request."""
    heads: tuple[int, int] = (4, 2)
    dim: int = 64
    block: int = 16
    dtype: torch.dtype = torch.float32
    mask: Mask = CAUSAL
    rotated: int | None = None
    """The elements of a head that are rotated. None for all."""
    cache_dtype: torch.dtype | None = None
    """The cache's dtype. None for `dtype`."""
    poison: bool = False
    """Fill the blocks that belong to no request with NaN."""
    poison_tail: bool = False
    """Fill the slots after each request's last key, in its last block, with NaN."""
    strided: bool = False
    """Query, key and value are views of one tensor, like the output of a packed projection."""
    strided_cache: bool = False
    """Keys and values are views of one tensor [num_blocks, num_kv_heads, block_size, 2 * head_dim]."""
    gain: float = 1.0
    """The factor of the queries. It is about the standard deviation of the scores."""
    scale: float | None = None
    """The factor of the scores. None for dim ** -0.5."""
    spare_blocks: int = 0
    """Odd block numbers of requests are raised by this number. The blocks in between belong to no request."""

    def __post_init__(self) -> None:
        num_heads, kv_heads = self.heads
        self.factor = self.dim**-0.5 if self.scale is None else self.scale
        needed = [-(-n // self.block) for n in self.seq_lens]
        count, width = sum(needed) + len(needed), max(needed) + 1  # more blocks, and columns, than are needed
        order = (torch.randperm(count, generator=self.g) + 1).tolist()
        order = [block + self.spare_blocks * (block % 2) for block in order]
        self.blocks = [[order.pop() for _ in range(blocks)] for blocks in needed]
        table = [row + [0] * (width - len(row)) for row in self.blocks]
        self.table = torch.tensor(table, dtype=torch.int32)
        self.cache = self._random_cache(1 + count + self.spare_blocks)
        packed = self._random(sum(self.query_lens), num_heads + 2 * kv_heads, self.dim)
        packed[:, :num_heads] *= self.gain
        rows = packed.split((num_heads, kv_heads, kv_heads), dim=1)
        self.query, key, value = rows if self.strided else (each.contiguous() for each in rows)
        places = [
            (blocks, max(seq_len - query_len + i, 0), seq_len)
            for blocks, query_len, seq_len in zip(self.blocks, self.query_lens, self.seq_lens, strict=True)
            for i in range(query_len)
        ]
        positions = [position for _, position, _ in places]
        slots = [blocks[p // self.block] * self.block + p % self.block if n else NULL_SLOT for blocks, p, n in places]
        rotary, rotated = None, self.dim if self.rotated is None else self.rotated
        if rotated:
            rotary = rotary_table(RotaryConfig(), max(POSITIONS, *self.seq_lens), rotated, torch.device("cpu"))
        self.new = NewRows(key, value, rotary, torch.tensor(positions), torch.tensor(slots))
        starts = torch.tensor([0, *self.query_lens]).cumsum(0).int()
        lengths = torch.tensor(self.seq_lens, dtype=torch.int32)
        self.lengths = DeviceLengths(lengths, starts, max(self.query_lens))
        self.host_lengths = HostLengths(list(self.query_lens), list(self.seq_lens))

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.g).to(self.dtype)

    def _random_cache(self, total: int) -> KVCache:
        used = {block for row in self.blocks for block in row}
        parts = [self._random(total, self.block, self.heads[1], self.dim) for _ in range(2)]
        for part in parts:
            part[0] = 0
            if self.poison:
                part[[b for b in range(1, total) if b not in used]] = torch.nan
            for row, length in zip(self.blocks, self.seq_lens, strict=True):
                if self.poison_tail and length % self.block:
                    part[row[-1], length % self.block :] = torch.nan
        if self.strided_cache:
            both = torch.cat(parts, dim=-1).transpose(1, 2).contiguous().transpose(1, 2)
            parts = list(both.to(self.cache_dtype or self.dtype).split(self.dim, dim=-1))
        return KVCache(*(part.to(self.cache_dtype or self.dtype) for part in parts))

    def spread_values(self, blocks: Sequence[int]) -> None:
        """Set large values in a request's blocks, so that a block that is left out or counted twice shows.

        Random values would average out over thousands of keys. The values of two blocks nearly cancel each other.
        """
        for place, block in enumerate(blocks):
            self.cache.value[block] += (len(blocks) if place % 2 else -len(blocks)) / 4

    def rotated_query(self) -> Tensor:
        """Return the rotated query, in float64."""
        return oracles.rotate(self.query.double(), self.new.rotary, self.new.positions)

    def stored(self) -> KVCache:
        """Return the keys and values that the cache must hold for the new rows, in float64."""
        parts = oracles.rotate(self.new.key.double(), self.new.rotary, self.new.positions), self.new.value.double()
        if self.cache_dtype == FP8:
            parts = tuple(part.float().clamp(-448, 448).to(FP8).double() for part in parts)
        return KVCache(*parts)

    def expected(self) -> list[Tensor]:
        """Return the expected output of each request, in float64."""
        query, new, row, out = self.rotated_query(), self.stored(), 0, list[Tensor]()
        for query_len, seq_len, blocks in zip(self.query_lens, self.seq_lens, self.blocks, strict=True):
            mine = slice(row, row + query_len)
            row += query_len
            out.append(torch.zeros_like(query[mine]))
            if query_len and seq_len:
                keys, values = (oracles.gather_request(part, blocks, seq_len).double() for part in self.cache)
                keys[-query_len:], values[-query_len:] = (part[mine] for part in new)
                words = [] if self.mask.ancestors is None else self.mask.ancestors[mine].tolist()
                out[-1] = oracles.attention(query[mine], keys, values, self.factor, self.mask, words)
        return out

    def cells(self) -> list[Tensor]:
        """Return the cells of the cache that a pass may write: the cells of its slots, and the null block."""
        slots = [slot for slot in self.new.slot_mapping.tolist() if slot != NULL_SLOT]
        return [c for part in self.cache for c in (part[0], *(part[s // self.block, s % self.block] for s in slots))]

    def run(self, run: Run, attend: Attend) -> Tensor:
        """Run one pass and return its output. The cache then holds the new rows."""
        given = self.query, self.cache, self.table, self.lengths, self.mask, self.new
        return run(attend, *given, scale=self.factor, written=self.cells())

    def check(self, run: Run, attend: Attend = ops.paged_attention, tolerance: float | None = None) -> None:
        """Check the output of one pass, and that it writes the right cells of the cache and no others.

        Args:
            attend: an op, or the attention of a device.
            tolerance: of the output. None for the dtype's.
        """
        tolerance = TOLERANCE[self.dtype] if tolerance is None else tolerance
        out, new = self.expected(), self.stored()
        seen = self.run(run, attend)
        assert seen.shape == self.query.shape
        for number, (mine, wanted) in enumerate(zip(seen.split(list(self.query_lens)), out, strict=True)):
            what = f"{len(wanted)} rows, {self.seq_lens[number]} keys"
            expect_close(mine, wanted, tolerance, f"output of request {number} of {len(out)} ({what})")
        stored = 0.0 if self.cache_dtype == FP8 else tolerance
        self.check_stored(new, lambda now, wanted, what: expect_close(now, wanted, stored, what))

    def check_stored(self, wanted: KVCache, compare: Callable[[Tensor, Tensor, str], None]) -> None:
        """Compare the cells of the pass's rows with `wanted`."""
        live = self.new.slot_mapping != NULL_SLOT
        slots = self.new.slot_mapping[live]
        for name, now, expected in zip(("keys", "values"), self.cache, wanted, strict=True):
            mine = _cells(now, slots // self.block, slots % self.block)
            compare(mine, _cells(expected, live), f"{name} of the pass's rows in the cache")


def _cells(cache: Tensor, *index: Tensor) -> Tensor:
    """Return cache[index]. For FP8 it goes through uint8, as torch before 2.8 has no index ops for FP8."""
    return cache[index] if cache.dtype != FP8 else cache.view(torch.uint8)[index].view(FP8)


def rows_for(
    platform: Platform, attention: str, seed: int, query_lens: Sequence[int], seq_lens: Sequence[int],
    heads: tuple[int, int] = (4, 2), *, dim: int = 64, block: int = 16, dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Rows:  # fmt: skip
    """Return random rows in a shape that the attention of this name supports; see `supported_shape`."""
    backend = attention_backend(platform, attention)
    shape = supported_shape(backend, heads, AttentionShape(dtype, dim, block))
    g = torch.Generator().manual_seed(seed)
    return Rows(g, query_lens, seq_lens, heads, shape.dim, shape.block, shape.dtype, **options)


def far_cache(platform: Platform, rows: Rows) -> tuple[KVCache, Callable[[Tensor], Tensor]]:
    """Return the device's copy of a cache with its odd blocks 2^31 elements further on, and a map from host to device.

    The map takes a block of the cache of `rows` to its copy. Keys and values are views of one tensor of a little more
    than 2^31 elements, and few of its pages are touched.

    Raises:
        Absent: the device has no memory for it.
    """
    blocks, *shape = rows.cache.key.shape
    far = -(-(1 << 31) // rows.cache.key[0].numel())
    size = far + 2 * blocks
    try:
        whole = torch.empty(size, *shape, dtype=rows.dtype, device=platform.device)
    except RuntimeError as error:
        raise Absent(f"no memory for {size * rows.cache.key[0].nbytes} bytes: {error}") from error
    cache = KVCache(whole[:-blocks], whole[blocks:])

    def moved(block: Tensor) -> Tensor:
        return block + far * (block % 2)

    for block, place in enumerate(moved(torch.arange(blocks)).tolist()):
        for part, given in zip(cache, rows.cache, strict=True):
            part[place].copy_(given[block])
    return cache, moved


def attention_of(platform: Platform, attention: str, rows: Rows) -> Attend:
    """Return the attention of this name as a function with the arguments of `ops.paged_attention`."""
    backend = attention_backend(platform, attention)

    def attend(
        query: Tensor, cache: KVCache, table: Tensor, lengths: DeviceLengths, mask: Mask, new: NewRows, *, scale: float
    ) -> Tensor:
        key, value, rotary, positions, slots = new
        window = mask.window or None
        layer = AttentionLayer(*rows.heads, query.shape[2], scale, rotary, mask.causal, window, mask.sinks)
        seq_lens, starts, query_len = lengths
        metadata = AttentionMetadata(starts, seq_lens, positions, slots, table, query_len)
        context = ForwardContext(metadata, 0, rows.host_lengths if backend.host_parameters else None)
        try:
            return backend.forward(layer, 0, query, key, value, cache, context)
        except UnsupportedError as error:
            raise Absent(f"attention '{attention}': {error}") from error

    return attend


def check_attention(platform: Platform, attention: str, seed: int, *rows: Any, **shape: Any) -> None:
    """Check that attention gives the float64 results for the rows of `rows_for`."""
    made = rows_for(platform, attention, seed, *rows, **shape)
    made.check(run_on(platform), attention_of(platform, attention, made))
