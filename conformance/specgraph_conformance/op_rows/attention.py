"""Rows of the attention ops and of the write to the KV cache, against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from specgraph import ops
from specgraph.ops import DeviceLengths, KVCache, Mask, NewRows
from torch import Tensor

from specgraph_conformance.attention_rows import Rows
from specgraph_conformance.op_table import FLOATS, HALVES, Run, Table
from specgraph_conformance.rig import expect_close

TABLE = Table()


def by_device_lengths(
    rows: Rows, is_fused: bool, query: Tensor, cache: KVCache, table: Tensor, lengths: DeviceLengths, mask: Mask,
    new: NewRows, *, scale: float,
) -> Tensor:  # fmt: skip
    """Run `paged_attention`. If it is not fused, run `rotate_and_store` before it."""
    if is_fused:
        return ops.paged_attention(query, cache, table, lengths, mask, new, scale=scale)
    return ops.paged_attention(ops.rotate_and_store(query, new, cache), cache, table, lengths, mask, scale=scale)


def by_host_lengths(
    rows: Rows, is_fused: bool, query: Tensor, cache: KVCache, table: Tensor, lengths: DeviceLengths, mask: Mask,
    new: NewRows, *, scale: float,
) -> Tensor:  # fmt: skip
    """Run `paged_attention_host`. If it is not fused, run `rotate_and_store` before it."""
    out = torch.full_like(query, -7.0)
    rotated, rest = (query, new) if is_fused else (ops.rotate_and_store(query, new, cache), None)
    ops.paged_attention_host(rotated, cache, table, rows.host_lengths, mask, rest, scale=scale, out=out)
    return out


def by_plain_torch(
    rows: Rows, is_fused: bool, query: Tensor, cache: KVCache, table: Tensor, lengths: DeviceLengths, mask: Mask,
    new: NewRows, *, scale: float,
) -> Tensor:  # fmt: skip
    """Run `paged_attention` as on a device without a kernel for the op."""
    return ops.paged_attention.reference(query, cache, table, lengths, mask, new, scale=scale)


LENGTHS = {"device": by_device_lengths, "host": by_host_lengths}
WITH_PLAIN = {**LENGTHS, "plain": by_plain_torch}
STORES = {"apart": False, "fused": True}


def check(rows: Rows, run: Run, lengths: Callable[..., Tensor] = by_device_lengths, store: bool = True) -> None:
    """Check the attention of `rows` by one of the ops in `LENGTHS`. `store` is True if the op also stores the rows."""
    rows.check(run, partial(lengths, rows, store))


def sinks_of(g: torch.Generator, heads: int) -> Tensor:
    """Return random sinks, float32 [heads]."""
    return torch.randn(heads, generator=g) * 2


@TABLE.row(
    "attention-ops",
    "Attention by device lengths and by host lengths, after `rotate_and_store` or with its own storing of keys, gives "
    "float64's output and KV.",
    hazard="attention-op-rows",
    cause="an implementation of this op on this device; the cases of group attention look at one property each",
    causal={"causal": True, "not-causal": False}, lengths=LENGTHS, store=STORES,
)  # fmt: skip
def attention_ops(run: Run, g: torch.Generator, causal: bool, lengths: Callable[..., Tensor], store: bool) -> None:
    for query_lens in ([4] * 9, [4, 1, 3, 2, 4, 1, 4, 3, 4]):
        rows = Rows(g, query_lens, [4, 37, 0, 90, 16, 17, 5, 64, 33], mask=Mask(causal), poison=True)
        check(rows, run, lengths, store)


@TABLE.row(
    "attention-of-one-row",
    "With one row per request, over caches of their own and over views of one tensor, attention that also stores the "
    "row gives float64's output and KV.",
    hazard="attention-op-rows",
    cause="paged_attention: the row's own key, which need not travel through the cache, or strides of the cache",
    dtype=FLOATS, cache={"contiguous": False, "strided": True}, lengths=LENGTHS,
)  # fmt: skip
def one_row(run: Run, g: torch.Generator, dtype: torch.dtype, cache: bool, lengths: Callable[..., Tensor]) -> None:
    seq_lens = [1, 37, 0, 90, 16, 17, 5, 64, 33]
    rows = Rows(g, [1] * 9, seq_lens, (8, 2), dtype=dtype, strided=True, strided_cache=cache, poison=True)
    check(rows, run, lengths)


@TABLE.row(
    "windowed-attention",
    "Attention over a sliding window, with and without sinks, gives float64's output; keys before the window are not "
    "seen.",
    hazard="window-one-block-short",
    cause="paged_attention: a window one key or one block too long or too short, a sink left out or with a value",
    window={"7": (7, False), "20-sinks": (20, True), "sinks": (0, True)}, lengths=WITH_PLAIN,
)  # fmt: skip
def windows(run: Run, g: torch.Generator, window: tuple[int, bool], lengths: Callable[..., Tensor]) -> None:
    keys, has_sinks = window
    mask = Mask(window=keys, sinks=sinks_of(g, 4) if has_sinks else None)
    check(Rows(g, [4] * 6, [4, 37, 0, 90, 16, 17], mask=mask), run, lengths)


@TABLE.row(
    "windows-of-ragged-rows",
    "Windows and sinks with the layer's own scale, in a batch of ragged rows with inert requests between live ones, "
    "give float64's output.",
    hazard="attention-own-scale",
    cause="paged_attention: the same number of rows for all requests, or a scale of head_dim ** -0.5",
    window=[0, 5, 33], lengths=LENGTHS,
)  # fmt: skip
def ragged_windows(run: Run, g: torch.Generator, window: int, lengths: Callable[..., Tensor]) -> None:
    mask = Mask(window=window, sinks=sinks_of(g, 8))
    rows = Rows(g, [19, 1, 3, 6, 2], [19, 40, 0, 70, 33], (8, 2), mask=mask, scale=0.3, poison=True, poison_tail=True)
    check(rows, run, lengths)


@TABLE.row(
    "fp8-cache",
    "A cache in e4m3 holds the nearest values, the largest one for those beyond it, and attention over it is within "
    "rounding of float64 over what it holds.",
    cause="paged_attention: values that are not saturated, or a new key or value that is used before it is rounded",
    needs=("float8",),
    dtype=FLOATS, window={"all": 0, "windowed": 9}, lengths=LENGTHS,
)  # fmt: skip
def fp8_cache(run: Run, g: torch.Generator, dtype: torch.dtype, window: int, lengths: Callable[..., Tensor]) -> None:
    fp8 = torch.float8_e4m3fn
    made = Rows(g, [3, 1, 1], [20, 0, 35], dtype=dtype, mask=Mask(window=window), rotated=0, cache_dtype=fp8)
    made.new.value[0, 0, :2] = torch.tensor([600.0, -600.0])
    limit = {torch.float32: 1e-3, torch.bfloat16: 3e-2}[dtype] * float(torch.cat(made.expected()).abs().max())
    made.check(run, partial(lengths, made, True), limit)


def ancestors_of(parents: Iterable[Iterable[int]]) -> Tensor:
    """Return int64 [n]: for each row i, a word with the bits of row i and of the given rows."""
    return torch.tensor([1 << i | sum(1 << j for j in rows) for i, rows in enumerate(parents)])


@TABLE.row(
    "tree-attention",
    "Rows of a tree attend to the context and to their own ancestors, as in float64.",
    hazard="sibling-sees-sibling",
    cause="paged_attention: a causal mask over the rows of the tree, or bits of another row",
    lengths=LENGTHS,
)
def tree(run: Run, g: torch.Generator, lengths: Callable[..., Tensor]) -> None:
    words = ancestors_of([[], [0], [0], [0, 1], [0, 1], [0, 2], [0, 1, 4], [0, 2, 5]])
    mask = Mask(causal=False, ancestors=words.repeat(3), tree_len=8)
    check(Rows(g, [8] * 3, [13, 0, 40], dim=32, mask=mask, scale=0.2, poison=True, poison_tail=True), run, lengths)


@TABLE.row(
    "tree-attention-in-half",
    "In bfloat16, with four query heads per key head, each of 48 rows attends to up to 3,000 keys and to its own "
    "ancestors as in float64.",
    hazard="trees-of-one-shape",
    cause="paged_attention: rows past a tile, splits of the keys that are merged wrongly, or words of another row",
    keys=[50, 3000],
)
def large_tree(run: Run, g: torch.Generator, keys: int) -> None:
    count = 48
    drawn = (torch.rand(3 * count, count, generator=g) < 0.3).unflatten(0, (3, count)).tril(-1).flatten(0, 1)
    words = ((drawn | torch.eye(count, dtype=torch.bool).repeat(3, 1)).long() << torch.arange(count)).sum(-1)
    mask = Mask(causal=False, ancestors=words, tree_len=count)
    rows = Rows(g, [count] * 3, [keys + count, 0, count + 7], (8, 2), dtype=torch.bfloat16, mask=mask, scale=0.1)
    rows.spread_values(rows.blocks[0])
    check(rows, run)


def check_store(rows: Rows, run: Run, compare: Callable[[Tensor, Tensor, str], None]) -> None:
    """Compare the query and the cache cells that `rotate_and_store` gives with float64."""
    query, new = rows.rotated_query(), rows.stored()
    seen = run(ops.rotate_and_store, rows.query, rows.new, rows.cache, written=rows.cells())
    compare(seen, query, "queries")
    rows.check_stored(new, compare)


def close(seen: Tensor, wanted: Tensor, what: str) -> None:
    """Check for equality up to float32's rounding."""
    expect_close(seen, wanted, 1e-5, what)


@TABLE.row(
    "rotate-and-store",
    "Rotary embedding of the first `rotated` of 64 elements passes the others through, and keys and values go to their "
    "slots in caches of any strides; a row without a slot writes nothing.",
    hazard="part-of-the-head-rotated",
    cause="rotate_and_store: pairs of elements counted over the whole head, or slots counted in a contiguous cache",
    rotated=[0, 32, 48, 64], cache={"contiguous": False, "strided": True},
)  # fmt: skip
def rotate_and_store(run: Run, g: torch.Generator, rotated: int, cache: bool) -> None:
    rows = Rows(g, [4, 2, 3], [37, 0, 16], rotated=rotated, strided=cache, strided_cache=cache)
    check_store(rows, run, close)


@TABLE.row(
    "rotation-in-float32",
    "Rotation rounds once: queries and keys are the nearest values of their dtype to float64's.",
    hazard="part-of-the-head-rotated",
    cause="rotate_and_store: cosines and sines, or products, in the narrow type",
    dtype=HALVES,
)
def rounding(run: Run, g: torch.Generator, dtype: torch.dtype) -> None:
    def rounded(seen: Tensor, wanted: Tensor, what: str) -> None:
        # 1e-5: a float32 result next to the middle of two values may be rounded either way.
        excess = (seen.double() - wanted).abs() - wanted.abs() * torch.finfo(dtype).eps / 2 * 1.01 - 1e-5
        expect_close(excess.clamp(min=0), torch.zeros_like(excess), 0.0, f"rounding of {what}")

    check_store(Rows(g, [9, 9], [9, 50], (2, 2), dtype=dtype), run, rounded)


@TABLE.row(
    "rotation-of-late-positions",
    "Positions up to 40,000 are rotated by their own angles.",
    hazard="part-of-the-head-rotated",
    cause="rotate_and_store: a table of fewer rows, whose last one is taken for all positions past it",
)
def late_positions(run: Run, g: torch.Generator) -> None:
    positions = torch.tensor([0, 2047, 2048, 4095, 4096, 8192, 16_385, 32_767, 32_768, 39_999])
    angles = torch.rand(40_000, 32, generator=g) * 6
    rows = Rows(g, [10], [10], (2, 2))
    rows.new = rows.new._replace(positions=positions, rotary=torch.cat((angles.cos(), angles.sin()), dim=-1))
    check_store(rows, run, close)
