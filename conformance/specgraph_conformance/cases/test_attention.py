"""Paged attention against float64: the core's two backends (device lengths, host lengths) and the device's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from specgraph.device import Platform
from specgraph.ops import DeviceLengths, KVCache, Mask, NewRows
from torch import Tensor
from torch.utils._pytree import tree_map_only

from specgraph_conformance.attention_rows import TOLERANCE, Rows, attention_of, check_attention, far_cache, rows_for
from specgraph_conformance.case import Absent, case
from specgraph_conformance.op_run import run_on
from specgraph_conformance.rig import attention_backend, captured, expect_close, expect_equal, on_host, replay_and_wait

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPES: dict[str, tuple[list[int], list[int], dict[str, Any]]] = {
    **{
        f"one-row-{heads[0]}x{heads[1]}-{dim}": ([1] * 4, [16, 33, 70, 48], {"heads": heads, "dim": dim})
        for heads in ((4, 4), (4, 2), (8, 2), (8, 1))
        for dim in (64, 128)
    },
    **{f"verify-of-{rows}": ([rows] * 3, [rows, 16 + rows // 2, 50], {}) for rows in (2, 3, 4, 6, 8)},
    **{f"blocks-of-{block}": ([4] * 3, [128, 129, 256], {"block": block}) for block in (16, 32, 128)},
    **{f"{length}-keys": ([1] * 3, [length, 40, length], {}) for length in (1, 15, 16, 17, 31, 32, 33, 48)},
    **{f"{dtype}".removeprefix("torch."): ([4] * 3, [4, 37, 90], {"dtype": dtype}) for dtype in DTYPES},
    "ragged": ([19, 1, 6], [19, 40, 22], {}),
    "not-causal": ([5, 5], [21, 40], {"mask": Mask(causal=False)}),
    "not-rotated": ([3, 3], [21, 40], {"rotated": 0}),
    "strided": ([4] * 3, [4, 37, 90], {"strided": True}),
    "1000-keys": ([1, 1, 1], [1000, 3, 511], {}),
}
"""Name -> the rows of each request, its keys, and options of `Rows`."""


@pytest.mark.parametrize("shape", SHAPES)
@case(
    "attention.equals-float64",
    "The output is float64's: in decode and verify passes, for every ratio of query heads to key heads, block size "
    "and dtype, on both sides of block borders, with and without causal mask and rotation, of strided and ragged rows.",
    cause="what the name says: a head mapped to another, a mask that counts from the first row, a block size baked "
    "into slots, a rounded number of blocks, sums in the narrow type, contiguous inputs, splits merged wrongly",
)
def test_shapes(platform: Platform, attention: str, shape: str, seed: int) -> None:
    rows, keys, options = SHAPES[shape]
    check_attention(platform, attention, seed, rows, keys, **options)


@case(
    "attention.request-without-rows",
    "A request without rows takes no row of its neighbours, and their output is float64's.",
    hazard="query-len-zero",
    cause="no early return for zero rows: every later request's token index moves",
    quick=True,
)
def test_no_rows(platform: Platform, attention: str, seed: int) -> None:
    check_attention(platform, attention, seed, [2, 0, 3, 0], [18, 0, 33, 0])


@pytest.mark.parametrize("seq_lens", [[0, 21, 0, 64], [0, 0, 0]], ids=["some", "all"])
@case(
    "attention.inert-requests",
    "Requests of length 0 write no KV and give zeros, also where all of a pass are inert; the output of the others is "
    "float64's.",
    hazard="padded-rows-write-kv",
    cause="padded rows attend to length 1, or store to slot 0, or a softmax over no keys: NaN",
    quick=True,
)
def test_inert(platform: Platform, attention: str, seq_lens: list[int], seed: int) -> None:
    check_attention(platform, attention, seed, [4] * len(seq_lens), seq_lens)


@case(
    "attention.reads-its-own-blocks-only",
    "NaN in every block that no request owns changes nothing.",
    hazard="stale-padding-rows",
    cause="keys past the length are multiplied by zero instead of left out, or the block table is read past its end",
)
def test_poison(platform: Platform, attention: str, seed: int) -> None:
    check_attention(platform, attention, seed, [1, 4, 4], [16, 33, 60], poison=True)


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
    rows = rows_for(platform, attention, seed, [2, 2, 2], [keys, 7, 600])
    # Thousands of random keys average out. The earliest keys get larger values, so that it shows if they are missing.
    rows.cache.value[rows.blocks[0][0]] += keys / 8
    rows.check(run_on(platform), attention_of(platform, attention, rows))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: f"{dtype}".removeprefix("torch."))
@case(
    "attention.large-scores",
    "With scores of up to about 30, the output is within the dtype's rounding of float64.",
    hazard="attention-rounded-scores",
    cause="scores are rounded to the narrow type before the softmax; keep them in float32",
)
def test_large_scores(platform: Platform, attention: str, dtype: torch.dtype, seed: int) -> None:
    check_attention(platform, attention, seed, [4] * 3, [40, 300, 90], dtype=dtype, gain=8.0, rotated=0)


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


@case(
    "attention.repeats-bit-for-bit",
    "The same pass twice gives the same bits.",
    cause="splits of the keys that are summed in the order in which they finish",
)
def test_repeats(platform: Platform, attention: str, seed: int) -> None:
    rows = rows_for(platform, attention, seed, [4] * 3, [300, 37, 90])
    run, attend = run_on(platform), attention_of(platform, attention, rows)
    first = rows.run(run, attend)
    for _ in range(4):
        expect_equal(rows.run(run, attend), first)


@pytest.mark.parametrize("factor", [0.02, 0.3])
@case(
    "attention.scale-of-the-layer",
    "Scores are multiplied by the layer's own scale, whatever the head size is.",
    hazard="attention-own-scale",
    cause="a scale of head_dim ** -0.5 in the kernel, or one that is applied twice",
)
def test_scale(platform: Platform, attention: str, factor: float, seed: int) -> None:
    check_attention(platform, attention, seed, [4] * 3, [4, 37, 90], scale=factor)


@pytest.mark.parametrize("heads", [(40, 8), (64, 4), (6, 2), (14, 2), (9, 3), (20, 4)], ids=lambda h: f"{h[0]}x{h[1]}")
@case(
    "attention.many-heads",
    "With 40 and with 64 query heads, and with 3, 5 and 7 per key head, each head has float64's output, in decode and "
    "verify passes.",
    hazard="attention-many-blocks",
    cause="query heads past a fixed number, or groups that are no power of two, matched to the key heads wrongly",
)
def test_heads(platform: Platform, attention: str, heads: tuple[int, int], seed: int) -> None:
    for rows in (1, 4):
        check_attention(platform, attention, seed, [rows] * 3, [rows, 37, 70], heads)


@case(
    "attention.tail-of-the-last-block",
    "NaN behind a request's last key, in its own last block, changes nothing.",
    hazard="nan-behind-the-last-key",
    cause="values past the length that are multiplied by a weight of zero: 0 * NaN is NaN",
    quick=True,
)
def test_tail(platform: Platform, attention: str, seed: int) -> None:
    check_attention(platform, attention, seed, [2, 4, 4, 1], [2, 33, 60, 32], poison=True, poison_tail=True)


@case(
    "attention.many-blocks",
    "A request whose blocks lie 1,500 blocks apart in a large cache attends to its own keys.",
    hazard="attention-many-blocks",
    cause="block numbers of too few bits",
)
def test_blocks(platform: Platform, attention: str, seed: int) -> None:
    check_attention(platform, attention, seed, [2, 2], [40, 21], (4, 1), spare_blocks=1500)


@case(
    "attention.keys-past-31-bits",
    "Keys and values that lie 2^31 elements into a cache are written there and attended to.",
    hazard="kv-offset-in-32-bits",
    cause="a block number or a slot times the elements of one, in 32 bits",
)
def test_far(platform: Platform, attention: str, seed: int) -> None:
    made = rows_for(platform, attention, seed, [1, 3, 2], [33, 20, 48], dtype=torch.bfloat16)
    cache, moved = far_cache(platform, made)
    slots = made.new.slot_mapping
    slots = moved(slots // made.block) * made.block + slots % made.block
    given = made.query, moved(made.table), made.lengths, made.new._replace(slot_mapping=slots)
    query, table, lengths, new = tree_map_only(Tensor, lambda each: each.to(platform.device), given)
    attend = attention_of(platform, attention, made)
    out = on_host(attend(query, cache, table, lengths, made.mask, new, scale=made.factor))
    for number, (mine, wanted) in enumerate(zip(out.split(made.query_lens), made.expected(), strict=True)):
        expect_close(mine, wanted, TOLERANCE[made.dtype], f"output of request {number}")
    for part, far in zip(made.cache, cache, strict=True):
        part.copy_(on_host(far[moved(torch.arange(len(part))).to(platform.device)]))
    made.check_stored(made.stored(), lambda now, wanted, what: expect_close(now, wanted, TOLERANCE[made.dtype], what))


@pytest.mark.parametrize(("rows", "requests"), [(1, 4), (5, 4), (16, 4), (5, 40)])
@case(
    "attention.long-contexts-in-half",
    "In bfloat16, with four query heads per key head and up to 5,000 keys, each request of a small or a large batch "
    "attends to all of its keys and to no others.",
    hazard="attention-many-keys",
    cause="splits of the keys that are left out or added twice, or lengths of other requests where there are many",
)
def test_long_half(platform: Platform, attention: str, rows: int, requests: int, seed: int) -> None:
    lengths = [5000, rows + 3, 0, 700] if requests == 4 else [0 if r % 9 == 4 else 20 + 67 * r for r in range(requests)]
    made = rows_for(
        platform, attention, seed, [rows] * requests, lengths, (8, 2), dim=128, block=128, dtype=torch.bfloat16
    )
    for blocks in made.blocks:
        made.spread_values(blocks)
    made.check(run_on(platform), attention_of(platform, attention, made))


@pytest.mark.parametrize("rows", [1, 3])
@case(
    "attention.own-keys-of-long-contexts",
    "With contexts of a multiple of 64 and one to three more, up to 4,099 keys, each row sees the last of its keys.",
    hazard="attention-many-keys",
    cause="a last split, or a last part of one, that is left out where it has few keys",
)
def test_own_keys(platform: Platform, attention: str, rows: int, seed: int) -> None:
    lengths = [64 * n + extra for n in (1, 2, 4, 8, 16, 32, 64) for extra in (1, 3)]
    made = rows_for(platform, attention, seed, [rows] * len(lengths), lengths)
    # The pass's own rows get values so large that a missing one shows among thousands of others.
    made.new.value.mul_(torch.tensor(lengths).repeat_interleave(rows)[:, None, None])
    # Each row's share of the output is about 1. Shares cancel, so an output may be far below half precision's rounding.
    tolerance = None if made.dtype == torch.float32 else 0.1
    made.check(run_on(platform), attention_of(platform, attention, made), tolerance)
