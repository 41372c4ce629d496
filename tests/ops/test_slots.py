"""Slots of positions, and `advance`, against loops over Python integers."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from naive_slots import naive_slot

from specgraph import ops
from specgraph.ops.slots import slots_of


@st.composite
def tables(draw, max_requests: int = 5):
    """(block tables with holes, block_size, max_model_len); tables reach a little past max_model_len."""
    block_size = draw(st.sampled_from([1, 2, 4, 16]))
    max_model_len = draw(st.integers(2, 40))
    width = -(-(max_model_len + draw(st.integers(0, 12))) // block_size)
    requests = draw(st.integers(1, max_requests))
    owned = draw(st.lists(st.lists(st.integers(0, 30), min_size=width, max_size=width), min_size=requests,
                          max_size=requests))  # fmt: skip
    return owned, block_size, max_model_len


@given(tables(), st.data())
def test_slots_of_every_position(table, data):
    blocks, block_size, max_model_len = table
    count = data.draw(st.integers(1, 6))
    start = data.draw(st.lists(st.integers(-2, max_model_len + 8), min_size=len(blocks), max_size=len(blocks)))
    valid = data.draw(st.lists(st.booleans(), min_size=len(blocks), max_size=len(blocks)))
    positions = torch.tensor(start)[:, None] + torch.arange(count)
    got = slots_of(
        positions, torch.tensor(blocks, dtype=torch.int32), torch.tensor(valid)[:, None], max_model_len, block_size
    )
    wanted = [
        [naive_slot(p, row, ok, max_model_len, block_size) for p in places]
        for places, row, ok in zip(positions.tolist(), blocks, valid, strict=True)
    ]
    assert got.tolist() == wanted
    assert got.dtype == torch.int64


@given(tables(), st.data())
def test_advance_moves_live_requests_and_no_others(table, data):
    blocks, block_size, max_model_len = table
    n = len(blocks)
    lengths = data.draw(st.lists(st.integers(0, max_model_len), min_size=n, max_size=n))
    steps = data.draw(st.integers(1, 4))
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    positions, slots, draft_step = torch.full((n,), -7), torch.full((n,), -7), torch.zeros(1, dtype=torch.int64)
    block_table = torch.tensor(blocks, dtype=torch.int32)
    addresses = [t.data_ptr() for t in (seq_lens, positions, slots, draft_step)]
    for step in range(1, steps + 1):
        ops.advance(seq_lens, positions, slots, draft_step, block_table, max_model_len, block_size)
        now = [length + step if length else 0 for length in lengths]
        assert seq_lens.tolist() == now
        assert positions.tolist() == [min(max(length - 1, 0), max_model_len - 1) for length in now]
        assert slots.tolist() == [
            naive_slot(length - 1, row, length > 0, max_model_len, block_size)
            for length, row in zip(now, blocks, strict=True)
        ]
        assert draft_step.tolist() == [step]
    assert [t.data_ptr() for t in (seq_lens, positions, slots, draft_step)] == addresses
    assert block_table.tolist() == blocks


def test_advance_across_a_block_border_and_past_the_end():
    seq_lens = torch.tensor([3, 7, 0], dtype=torch.int32)
    positions, slots, step = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), torch.zeros(1).long()
    table = torch.tensor([[5, 2, 0], [9, 4, 0], [1, 1, 1]], dtype=torch.int32)
    seen = []
    for _ in range(3):
        ops.advance(seq_lens, positions, slots, step, table, 8, 4)
        seen.append((seq_lens.tolist(), positions.tolist(), slots.tolist()))
    assert seen == [
        ([4, 8, 0], [3, 7, 0], [5 * 4 + 3, 4 * 4 + 3, -1]),
        ([5, 9, 0], [4, 7, 0], [2 * 4 + 0, -1, -1]),  # the second request is at max_model_len: nothing is written
        ([6, 10, 0], [5, 7, 0], [2 * 4 + 1, -1, -1]),
    ]
