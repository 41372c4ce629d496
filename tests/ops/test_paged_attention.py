"""Paged attention beyond the op table: any mask over any batch, and calls that give equal bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specgraph_conformance.attention_rows import Rows
from torch import Tensor

from specgraph import ops
from specgraph.ops import DeviceLengths, HostLengths, KVCache, Mask

SINKS = torch.tensor([0.3, -2.0, 4.0, 0.0])


def by_host_lengths(query, cache, table, lengths, mask, new=None, *, scale):
    """The op with host lengths; `out` holds junk before."""
    on_host = HostLengths(lengths.query_start_loc.diff().tolist(), lengths.seq_lens.tolist())
    out = torch.full_like(query, float("nan"))
    ops.paged_attention_host(query, cache, table, on_host, mask, new, scale=scale, out=out)
    return out


WAYS = {"host": ops.paged_attention, "reference": ops.paged_attention.reference, "host lengths": by_host_lengths}


def in_place(op, *args, written=(), **kwargs):
    """Run an op on the rows themselves: see `specgraph_conformance.op_table.Run`."""
    return op(*args, **kwargs)


def rows(query_lens, seq_lens, mask=Mask(), seed=0, **options) -> Rows:  # noqa: B008
    g = torch.Generator().manual_seed(seed)
    return Rows(g, query_lens, seq_lens, dim=8, mask=mask, poison=True, poison_tail=True, **options)


def run(way: str, made: Rows) -> Tensor:
    """The output of one way over a copy of the cache."""
    cache = KVCache(*(part.clone() for part in made.cache))
    return WAYS[way](made.query, cache, made.table, made.lengths, made.mask, made.new, scale=made.factor)


@st.composite
def masks(draw, query_lens: list[int]) -> Mask:
    if draw(st.booleans()) and len(set(query_lens)) == 1:
        count, total = query_lens[0], sum(query_lens)
        drawn = draw(st.lists(st.integers(0, 2**count - 1), min_size=total, max_size=total))
        words = [1 << i % count | word & ((1 << i % count) - 1) for i, word in enumerate(drawn)]
        return Mask(causal=False, ancestors=torch.tensor(words), tree_len=count)
    if draw(st.booleans()):
        return Mask(window=draw(st.sampled_from([0, 1, 2, 5, 16, 17, 100])), sinks=draw(st.sampled_from([None, SINKS])))
    return Mask(draw(st.booleans()))


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_any_mask_over_any_batch_against_float64(way, data):
    """NaN in everything that no row may read, with requests that have no rows or no keys between the others."""
    uniform = st.integers(1, 6).map(lambda count: [count] * 3)
    query_lens = data.draw(st.one_of(uniform, st.lists(st.integers(0, 6), min_size=1, max_size=5)))
    query_lens[0] = max(query_lens[0], 1)
    seq_lens = [data.draw(st.one_of(st.just(0), st.integers(max(n, 1), n + 40))) for n in query_lens]
    made = rows(
        query_lens, seq_lens, data.draw(masks(query_lens)), data.draw(st.integers(0, 99)), scale=0.3,
        block=data.draw(st.sampled_from([1, 4, 16])), strided_cache=data.draw(st.booleans()),
        rotated=data.draw(st.sampled_from([0, 4, 8])),
        dtype=data.draw(st.sampled_from([torch.float32, torch.bfloat16])),
    )  # fmt: skip
    made.check(in_place, WAYS[way])


MASKS = {
    "causal": Mask(),
    "windowed": Mask(window=6, sinks=SINKS),
    "tree": Mask(causal=False, ancestors=torch.tensor([1, 3, 5] * 4), tree_len=3),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [1, 4, 16])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_device_and_host_lengths_fused_or_not_give_the_same_bits(dtype, block, mask):
    made = rows([3] * 4, [3, 0, 16, 33], mask, block=block, dtype=dtype)
    device, host = run("host", made), run("host lengths", made)
    query = ops.rotate_and_store(made.query, made.new, made.cache)
    apart = ops.paged_attention(query, made.cache, made.table, made.lengths, mask, scale=made.factor)
    assert torch.equal(device, host)
    assert torch.equal(device, apart)
    assert device.dtype == dtype


@pytest.mark.parametrize("way", WAYS)
def test_a_request_is_the_same_alone_and_in_a_batch(way):
    """Bit for bit, whatever its neighbours and however wide the tables are, on the host implementations."""
    made = rows([3, 3, 3], [9, 30, 17], block=4)
    together = run(way, made)
    lengths, mine = DeviceLengths(torch.tensor([30]).int(), torch.tensor([0, 3]).int(), 3), slice(3, 6)
    new = made.new._replace(**{n: getattr(made.new, n)[mine] for n in made.new._fields if n != "rotary"})
    given = made.query[mine], made.cache, made.table[1:2], lengths, made.mask, new
    alone = WAYS[way](*given, scale=made.factor)
    if way == "reference":
        torch.testing.assert_close(together[mine], alone)
    else:
        assert torch.equal(together[mine], alone)


@pytest.mark.parametrize("way", WAYS)
def test_bfloat16_is_accumulated_in_float32(way):
    """Only the last rounding differs from float64 over the same bfloat16 inputs.

    The reference is torch's fused attention in bfloat16, which also rounds each weight (at most 1) once.
    """
    made = rows([2, 2], [60, 31], dtype=torch.bfloat16, rotated=0)
    wanted = torch.cat(made.expected())
    atol = 2**-9 if way == "reference" else 1e-6
    torch.testing.assert_close(run(way, made).double(), wanted, rtol=2**-8, atol=atol)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_the_reference_in_parts_gives_what_it_gives_at_once(monkeypatch, mask):
    """However few requests it may gather at a time, uniform or ragged."""
    monkeypatch.setitem(ops.paged_attention.reference.__globals__, "GATHER_BYTES", 1)
    for first in (3, 2) if mask.causal else (3,):
        rows([first, 3, 3, 3], [9, 0, 30, 17], mask, block=4).check(in_place, ops.paged_attention.reference)


@pytest.mark.parametrize("way", WAYS)
def test_a_window_reads_no_block_before_it(way):
    """However long the context: NaN where no row may look stays out, also of the gathered part."""
    made = rows([2], [64], Mask(window=6), block=4)
    clean = run(way, made)
    for part in made.cache:
        part[made.blocks[0][:14]] = float("nan")  # positions 0 to 55; the first row sees from 57 on
    assert torch.equal(clean, run(way, made))
