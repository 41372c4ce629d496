"""Paged attention against float64: the core's two backends (device lengths, host lengths) and the device's own."""

from __future__ import annotations

import pytest
import torch
from specgraph.attention import NULL_SLOT, advance, allocate_metadata
from specgraph.device import Platform
from specgraph.ops import DeviceLengths, KVCache, Mask, NewRows
from torch import Tensor

from specgraph_conformance.attention_rows import TOLERANCE, Rows, attention_of, check_attention, rows_for
from specgraph_conformance.case import Absent, case
from specgraph_conformance.op_run import run_on
from specgraph_conformance.rig import attention_backend, captured, expect_close, expect_equal, on_host, replay_and_wait


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (8, 2), (8, 1)], ids=lambda h: f"{h[0]}x{h[1]}")
@pytest.mark.parametrize("dim", [64, 128])
@case(
    "attention.decode",
    "With one row per request, the output is float64's for every ratio of query heads to key heads.",
    cause="query heads mapped to the wrong key head, or the scale",
)
def test_decode(platform: Platform, attention: str, heads: tuple[int, int], dim: int, seed: int) -> None:
    check_attention(platform, attention, seed, [1] * 4, [5, 16, 33, 70], heads, dim=dim)


@pytest.mark.parametrize("rows", [2, 3, 4, 6, 8])
@case(
    "attention.verify",
    "With K + 1 rows per request, each row attends to the keys up to its own and to no later one.",
    cause="the causal mask counts from the first row instead of the last",
)
def test_verify(platform: Platform, attention: str, rows: int, seed: int) -> None:
    check_attention(platform, attention, seed, [rows] * 3, [rows, 16 + rows // 2, 50])


@pytest.mark.parametrize("block", [16, 32, 128])
@case(
    "attention.block-sizes",
    "Every block size gives the same attention.",
    cause="a block size baked into the kernel or into the slot arithmetic",
)
def test_block_sizes(platform: Platform, attention: str, block: int, seed: int) -> None:
    check_attention(platform, attention, seed, [4] * 3, [20, 129, 140], block=block)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 48])
@case(
    "attention.block-borders",
    "Lengths on both sides of a block border give float64's output.",
    cause="the number of blocks is rounded the wrong way, or the last block's mask is off by one",
)
def test_borders(platform: Platform, attention: str, length: int, seed: int) -> None:
    check_attention(platform, attention, seed, [1, 1], [length, 40])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
@case(
    "attention.dtypes",
    "Each precision is within its rounding of float64.",
    cause="products or sums in the narrow type instead of float32",
)
def test_dtypes(platform: Platform, attention: str, dtype: torch.dtype, seed: int) -> None:
    check_attention(platform, attention, seed, [4] * 3, [4, 37, 90], dtype=dtype)


@case(
    "attention.ragged-rows",
    "Requests with different numbers of rows in one pass (a prompt beside others) give float64's output.",
    cause="the kernel assumes the same number of rows for all requests",
)
def test_ragged(platform: Platform, attention: str, seed: int) -> None:
    check_attention(platform, attention, seed, [19, 1, 6], [19, 40, 22])


@case(
    "attention.request-without-rows",
    "A request without rows takes no row of its neighbours, and their output is float64's.",
    hazard="query-len-zero",
    cause="no early return for zero rows: every later request's token index moves",
    quick=True,
)
def test_no_rows(platform: Platform, attention: str, seed: int) -> None:
    check_attention(platform, attention, seed, [2, 0, 3, 0], [18, 0, 33, 0])


@case(
    "attention.inert-requests",
    "Requests of length 0 write no KV and give zeros; the output of the others is float64's.",
    hazard="padded-rows-write-kv",
    cause="padded rows attend to length 1, or store to slot 0",
    quick=True,
)
def test_inert(platform: Platform, attention: str, seed: int) -> None:
    check_attention(platform, attention, seed, [4] * 4, [0, 21, 0, 0])


@case(
    "attention.all-inert",
    "A pass of inert requests only, as in a warm-up, writes nothing and gives zeros.",
    hazard="padded-rows-write-kv",
    cause="a softmax over no keys: NaN",
    quick=True,
)
def test_all_inert(platform: Platform, attention: str, seed: int) -> None:
    check_attention(platform, attention, seed, [1] * 3, [0, 0, 0])


@case(
    "attention.reads-its-own-blocks-only",
    "NaN in every block that no request owns changes nothing.",
    hazard="stale-padding-rows",
    cause="keys past the length are multiplied by zero instead of left out, or the block table is read past its end",
)
def test_poison(platform: Platform, attention: str, seed: int) -> None:
    check_attention(platform, attention, seed, [1, 4, 4], [16, 33, 60], poison=True)


@case(
    "attention.not-causal",
    "Without the causal mask every row sees all of its request's keys (a parallel drafter's block).",
    cause="causal=False is ignored",
)
def test_not_causal(platform: Platform, attention: str, seed: int) -> None:
    check_attention(platform, attention, seed, [5, 5], [21, 40], mask=Mask(causal=False))


@case(
    "attention.without-rotation",
    "Layers without a rotary table leave queries and keys as they are.",
    cause="rotary=None isn't handled",
)
def test_no_rotary(platform: Platform, attention: str, seed: int) -> None:
    check_attention(platform, attention, seed, [3, 3], [21, 40], rotated=0)


@case(
    "attention.strided-rows",
    "Query, key and value as views of one packed projection are read by their strides.",
    cause="the kernel takes its inputs as contiguous",
)
def test_strided(platform: Platform, attention: str, seed: int) -> None:
    check_attention(platform, attention, seed, [4] * 3, [4, 37, 90], strided=True)


@pytest.mark.parametrize("requests", [9, 17, 33, 65])
@case(
    "attention.many-requests",
    "In a batch of up to 65 requests, each of another length and some inert, each request's output is float64's.",
    hazard="attention-many-requests",
    cause="requests beyond a tile or a fixed table read the blocks, lengths or rows of another request",
)
def test_many_requests(platform: Platform, attention: str, requests: int, seed: int) -> None:
    lengths = [0 if r % 8 == 5 else 4 + (37 * r) % 131 for r in range(requests)]
    check_attention(platform, attention, seed, [4] * requests, lengths)


@pytest.mark.parametrize("keys", [1025, 4097, 33_000])
@case(
    "attention.many-keys",
    "A request with up to 33,000 keys, beside shorter ones, attends to all of them.",
    hazard="attention-many-keys",
    cause="keys past a window or a fixed number of splits are left out, or partial results are merged wrongly",
)
def test_many_keys(platform: Platform, attention: str, keys: int, seed: int) -> None:
    rows = rows_for(platform, attention, seed, [2, 2, 2], [keys, 7, 600], block=128)
    # Random keys average out over thousands of them: the earliest ones get values that show where they are missing.
    rows.cache.value[rows.blocks[0][0]] += keys / 8
    rows.check(run_on(platform, "eager"), attention_of(platform, attention, rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
@case(
    "attention.large-scores",
    "With scores of up to about 30, the output is within the dtype's rounding of float64.",
    hazard="attention-rounded-scores",
    cause="scores are rounded to the narrow type before the softmax; keep them in float32",
)
def test_large_scores(platform: Platform, attention: str, dtype: torch.dtype, seed: int) -> None:
    check_attention(platform, attention, seed, [4] * 3, [40, 300, 90], dtype=dtype, gain=8.0, rotated=0)


@case(
    "attention.long-context",
    "A request with 1,000 keys beside one with 3 gives float64's output.",
    cause="partial results over splits of the keys are merged wrongly",
)
def test_long(platform: Platform, attention: str, seed: int) -> None:
    check_attention(platform, attention, seed, [1, 1, 1], [1000, 3, 511])


@case(
    "attention.captured-sees-new-lengths",
    "One captured pass follows lengths, slots, positions and blocks written after its capture, larger and smaller.",
    hazard="stale-metadata-copied-late",
    cause="a length that was read on the host at capture and is now part of a grid, a workspace or a maximum",
)
def test_captured(platform: Platform, attention: str, seed: int) -> None:
    if attention_backend(platform, attention).host_parameters:
        raise Absent(f"attention '{attention}' has host lengths: see the group task_update")
    large, small = [150, 33, 64], [2, 5, 0]
    passes = [rows_for(platform, attention, seed + i, [2] * 3, each) for i, each in enumerate((large, small, large))]
    first, attend = passes[0], attention_of(platform, attention, passes[0])
    new, lengths = first.new, first.lengths

    def tensors(rows: Rows) -> tuple[Tensor, ...]:
        return rows.query, *rows.cache, rows.table, rows.lengths.seq_lens, *rows.new[:2], *rows.new[3:]

    held = [torch.zeros_like(each, device=platform.device) for each in tensors(first)]
    query, keys, values, table, seq_lens, key, value, positions, slots = held
    starts = lengths.query_start_loc.to(platform.device)
    rotary = None if new.rotary is None else new.rotary.to(platform.device)
    given = (
        KVCache(keys, values), table, DeviceLengths(seq_lens, starts, lengths.query_len), first.mask,
        NewRows(key, value, rotary, positions, slots),
    )  # fmt: skip
    out = torch.zeros_like(query)
    graph = captured(platform, lambda: out.copy_(attend(query, *given, scale=first.factor)))
    for rows in passes:
        for memory, now in zip(held, tensors(rows), strict=True):
            memory.zero_()
            memory[tuple(slice(size) for size in now.shape)].copy_(now)
        replay_and_wait(platform, graph)
        expect_close(on_host(out), torch.cat(rows.expected()), TOLERANCE[first.dtype], "output of the replay")
    graph.close()


@case(
    "attention.advance-moves-one-token-on",
    "advance() moves lengths, positions, slots and the draft step as a host loop does, over block borders and the end.",
    hazard="metadata-not-rebuilt-between-steps",
    cause="part of the metadata stays behind",
    quick=True,
)
def test_advance(platform: Platform) -> None:
    lengths, limit, block = [15, 16, 47, 0], 48, 16
    blocks = [[3, 7, 2], [5, 1, 0], [4, 8, 6], [9, 9, 9]]
    table = torch.tensor(blocks, dtype=torch.int32, device=platform.device)
    metadata = allocate_metadata(4, 1, table)
    metadata.seq_lens.copy_(torch.tensor(lengths))
    step = torch.zeros(1, dtype=torch.int64, device=platform.device)
    for count in range(1, 5):
        advance(metadata, step, limit, block)
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
    rows = rows_for(platform, attention, seed, [4] * 3, [300, 37, 90])
    run, attend = run_on(platform, "eager"), attention_of(platform, attention, rows)
    first = rows.run(run, attend)
    for _ in range(4):
        expect_equal(rows.run(run, attend), first)
