"""Paged attention against float64: the core's two flavours, and each of the device's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from specgraph.attention import (
    NULL_SLOT,
    AttentionLayer,
    AttentionMetadata,
    HostLengths,
    KVCache,
    StepContext,
    allocate_metadata,
)
from specgraph.errors import UnsupportedError
from specgraph.models.config import RotaryConfig
from specgraph.models.rotary import rotary_table
from specgraph.platforms import Platform
from torch import Tensor

from specgraph_conformance import oracles
from specgraph_conformance.case import Absent, case
from specgraph_conformance.rig import attention_backend, captured, expect_equal, on_host

TOLERANCE = {torch.float32: 2e-3, torch.float16: 5e-3, torch.bfloat16: 3e-2}
POSITIONS = 2048


@dataclass
class Rows:
    """Requests of given row and key counts over a cache of random values, and what float64 makes of them."""

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
    strided: bool = False
    seed: int = 0
    metadata: AttentionMetadata = field(init=False)

    def __post_init__(self) -> None:
        device, generator = self.platform.device, torch.Generator().manual_seed(self.seed)
        num_heads, kv_heads = self.heads

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(self.dtype)

        table = rotary_table(RotaryConfig(), POSITIONS, self.dim, torch.device("cpu")) if self.rotary else None
        self.layer_on_host = AttentionLayer(num_heads, kv_heads, self.dim, self.dim**-0.5, table, self.causal)
        on_device = None if table is None else table.to(device)
        self.layer = AttentionLayer(num_heads, kv_heads, self.dim, self.dim**-0.5, on_device, self.causal)
        width = max(-(-n // self.block) for n in self.seq_lens) + 1
        order = (torch.randperm(len(self.seq_lens) * width, generator=generator) + 1).tolist()
        self.blocks = [[order.pop() for _ in range(-(-n // self.block))] for n in self.seq_lens]
        used = {block for row in self.blocks for block in row}
        total = 1 + len(self.seq_lens) * width
        self.key_cache, self.value_cache = (random(total, self.block, kv_heads, self.dim) for _ in range(2))
        for cache in (self.key_cache, self.value_cache):
            cache[0] = 0
            if self.poison:
                cache[[b for b in range(1, total) if b not in used]] = torch.nan
        rows = sum(self.query_lens)
        packed = random(rows, num_heads + 2 * kv_heads, self.dim)
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
                out[row : row + query_len] = oracles.attention(rows, k, v, self.layer.scale, self.causal)
            row += query_len
        return out, keys, values

    def check(self) -> None:
        """Output within the dtype's tolerance; caches written where they should be, and bit for bit nowhere else."""
        out, keys, values = self.expected()
        tolerance = TOLERANCE[self.dtype]
        seen = on_host(self.forward()).double()
        assert seen.shape == out.shape
        torch.testing.assert_close(seen, out, atol=tolerance, rtol=tolerance)
        written = [slot for slot in self.slots if slot != NULL_SLOT]
        others = [slot for slot in range(self.block, keys.shape[0] * self.block) if slot not in set(written)]
        for name, now, before, wanted in (
            ("keys", on_host(self.cache.key), self.key_cache, keys),
            ("values", on_host(self.cache.value), self.value_cache, values),
        ):
            now, before, wanted = (t.flatten(0, 1) for t in (now, before, wanted))
            torch.testing.assert_close(now[written].double(), wanted[written], atol=tolerance, rtol=tolerance)
            same = (now[others] == before[others]) | (now[others].isnan() & before[others].isnan())
            assert same.all(), f"{name} were written where no row has a slot"


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (8, 2), (8, 1)], ids=lambda h: f"{h[0]}x{h[1]}")
@pytest.mark.parametrize("dim", [64, 128])
@case(
    "attention.decode",
    "One row a request, over every grouping of query heads, is what float64 says.",
    cause="query heads mapped to the wrong key head, or the scale",
)
def test_decode(platform: Platform, attention: str, heads: tuple[int, int], dim: int, seed: int) -> None:
    Rows(platform, attention, [1] * 4, [5, 16, 33, 70], heads, dim, seed=seed).check()


@pytest.mark.parametrize("rows", [2, 3, 4, 6, 8])
@case(
    "attention.verify",
    "K + 1 rows a request each see the keys up to their own, and no later one.",
    cause="the causal mask counts from the first row instead of the last",
)
def test_verify(platform: Platform, attention: str, rows: int, seed: int) -> None:
    Rows(platform, attention, [rows] * 3, [rows, 16 + rows // 2, 50], seed=seed).check()


@pytest.mark.parametrize("block", [16, 32, 128])
@case(
    "attention.block-sizes",
    "Every block size gives the same attention.",
    cause="a block size baked into the kernel or into the slot arithmetic",
)
def test_block_sizes(platform: Platform, attention: str, block: int, seed: int) -> None:
    Rows(platform, attention, [4] * 3, [20, 129, 140], block=block, seed=seed).check()


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 48])
@case(
    "attention.block-borders",
    "Lengths on both sides of a block border are right.",
    cause="the number of blocks is rounded the wrong way, or the last block's mask is off by one",
)
def test_borders(platform: Platform, attention: str, length: int, seed: int) -> None:
    Rows(platform, attention, [1, 1], [length, 40], seed=seed).check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
@case(
    "attention.dtypes",
    "Each precision is within its rounding of float64.",
    cause="products or sums in the narrow type instead of float32",
)
def test_dtypes(platform: Platform, attention: str, dtype: torch.dtype, seed: int) -> None:
    Rows(platform, attention, [4] * 3, [4, 37, 90], dtype=dtype, seed=seed).check()


@case(
    "attention.ragged-rows",
    "Requests of different numbers of rows in one pass (a prompt beside others) are right.",
    cause="rows are taken as uniform",
)
def test_ragged(platform: Platform, attention: str, seed: int) -> None:
    Rows(platform, attention, [19, 1, 6], [19, 40, 22], seed=seed).check()


@case(
    "attention.request-without-rows",
    "A request without rows takes none of its neighbours', and theirs are right.",
    hazard="query-len-zero",
    cause="no early return for zero rows: every later request's token index moves",
    quick=True,
)
def test_no_rows(platform: Platform, attention: str, seed: int) -> None:
    Rows(platform, attention, [2, 0, 3, 0], [18, 0, 33, 0], seed=seed).check()


@case(
    "attention.inert-requests",
    "Requests of length 0 write nothing and give zeros, and the others are right.",
    hazard="padded-rows-write-kv",
    cause="padded rows attend to length 1, or store to slot 0",
    quick=True,
)
def test_inert(platform: Platform, attention: str, seed: int) -> None:
    Rows(platform, attention, [4] * 4, [0, 21, 0, 0], seed=seed).check()


@case(
    "attention.all-inert",
    "A pass of inert requests only, as in a warm-up, writes nothing and gives zeros.",
    hazard="padded-rows-write-kv",
    cause="a softmax over no keys: NaN",
    quick=True,
)
def test_all_inert(platform: Platform, attention: str, seed: int) -> None:
    Rows(platform, attention, [1] * 3, [0, 0, 0], seed=seed).check()


@case(
    "attention.reads-its-own-blocks-only",
    "NaN in every block that no request owns changes nothing.",
    hazard="stale-padding-rows",
    cause="keys past the length are multiplied by zero instead of left out, or the block table is read past its end",
)
def test_poison(platform: Platform, attention: str, seed: int) -> None:
    Rows(platform, attention, [1, 4, 4], [16, 33, 60], poison=True, seed=seed).check()


@case(
    "attention.not-causal",
    "Without the causal mask every row sees all of its request's keys (a parallel drafter's block).",
    cause="causal=False is ignored",
)
def test_not_causal(platform: Platform, attention: str, seed: int) -> None:
    Rows(platform, attention, [5, 5], [21, 40], causal=False, seed=seed).check()


@case(
    "attention.without-rotation",
    "Layers without a rotary table leave queries and keys as they are.",
    cause="rotary=None isn't handled",
)
def test_no_rotary(platform: Platform, attention: str, seed: int) -> None:
    Rows(platform, attention, [3, 3], [21, 40], rotary=False, seed=seed).check()


@case(
    "attention.strided-rows",
    "Query, key and value as views of one packed projection are read by their strides.",
    cause="the kernel takes its inputs as contiguous",
)
def test_strided(platform: Platform, attention: str, seed: int) -> None:
    Rows(platform, attention, [4] * 3, [4, 37, 90], strided=True, seed=seed).check()


@case(
    "attention.long-context",
    "A thousand keys, beside a request of three, are right.",
    cause="partial results over splits of the keys are merged wrongly",
)
def test_long(platform: Platform, attention: str, seed: int) -> None:
    Rows(platform, attention, [1, 1, 1], [1000, 3, 511], seed=seed).check()


@case(
    "attention.captured-sees-new-lengths",
    "A captured pass with device parameters follows lengths, slots, positions and blocks written after its capture.",
    hazard="stale-metadata-copied-late",
    cause="a length read on the host at capture (a grid, a workspace, a maximum)",
)
def test_captured(platform: Platform, attention: str, seed: int) -> None:
    backend = attention_backend(platform, attention)
    if backend.host_parameters:
        raise Absent(f"attention '{attention}' takes its lengths from the host: see the group task_update")
    small = Rows(platform, attention, [2] * 3, [2, 5, 0], seed=seed)
    large = Rows(platform, attention, [2] * 3, [150, 33, 64], seed=seed + 1)
    table = torch.zeros_like(large.metadata.block_table)
    held = allocate_metadata(3, 2, table)
    query, key, value = rows = [torch.zeros_like(t) for t in large.device_rows]
    cache = KVCache(*(torch.zeros_like(t) for t in large.cache))
    out = torch.zeros_like(rows[0])
    context = StepContext(held)
    graph = captured(platform, lambda: out.copy_(backend.forward(large.layer, 0, query, key, value, cache, context)))
    for source in (large, small, large):
        fresh = Rows(platform, attention, source.query_lens, source.seq_lens, seed=source.seed)
        for mine, theirs in zip(cache, fresh.cache, strict=True):
            mine[: theirs.shape[0]].copy_(theirs)
        for mine, theirs in zip(rows, fresh.device_rows, strict=True):
            mine.copy_(theirs)
        held.seq_lens.copy_(fresh.metadata.seq_lens)
        held.positions.copy_(fresh.metadata.positions)
        held.slot_mapping.copy_(fresh.metadata.slot_mapping)
        table.zero_()
        table[:, : fresh.metadata.block_table.shape[1]].copy_(fresh.metadata.block_table)
        graph.replay()
        platform.synchronize()
        expected, _, _ = fresh.expected()
        torch.testing.assert_close(on_host(out).double(), expected, atol=2e-3, rtol=2e-3)
    graph.close()


@case(
    "attention.advance-moves-one-token-on",
    "advance() moves lengths, positions, slots and the draft step as a host loop does, over block borders and the end.",
    hazard="metadata-not-rebuilt-between-steps",
    cause="part of the metadata stays behind",
    quick=True,
)
def test_advance(platform: Platform, attention: str) -> None:
    backend = attention_backend(platform, attention)
    lengths, limit, block = [15, 16, 47, 0], 48, 16
    blocks = [[3, 7, 2], [5, 1, 0], [4, 8, 6], [9, 9, 9]]
    table = torch.tensor(blocks, dtype=torch.int32, device=platform.device)
    metadata = allocate_metadata(4, 1, table)
    metadata.seq_lens.copy_(torch.tensor(lengths))
    step = torch.zeros(1, dtype=torch.int64, device=platform.device)
    for count in range(1, 5):
        backend.advance(metadata, step, limit, block)
        platform.synchronize()
        assert on_host(step).tolist() == [count]
        wanted = [n + count if n else 0 for n in lengths]
        assert on_host(metadata.seq_lens).tolist() == wanted
        positions = [min(max(n - 1, 0), limit - 1) for n in wanted]
        assert on_host(metadata.positions).tolist() == positions
        slots = []
        for row, n in enumerate(wanted):
            inside = 0 < n <= limit and blocks[row][(n - 1) // block] != 0
            slots.append(blocks[row][(n - 1) // block] * block + (n - 1) % block if inside else NULL_SLOT)
        assert on_host(metadata.slot_mapping).tolist() == slots


@case(
    "attention.repeats-bit-for-bit",
    "The same pass twice gives the same bits.",
    cause="splits of the keys that are summed in the order in which they finish",
)
def test_repeats(platform: Platform, attention: str, seed: int) -> None:
    rows = Rows(platform, attention, [4] * 3, [300, 37, 90], seed=seed)
    first = on_host(rows.forward())
    for _ in range(4):
        expect_equal(on_host(rows.forward()), first)
