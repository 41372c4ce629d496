"""The first node of a propose and of a verify, against loops over requests and rows."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from naive_slots import naive_slot

from specgraph import ops

JUNK = -99


def ints(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.full(shape, JUNK, dtype=dtype)


@st.composite
def batches(draw):
    """A padded batch with inert requests anywhere, lengths up to the limit, and null blocks after the last own one."""
    block_size = draw(st.sampled_from([1, 4, 16]))
    max_model_len = draw(st.integers(4, 40))
    steps = draw(st.sampled_from([1, 2, 3, 5, 7]))
    width = -(-(max_model_len + 2 * (steps + 1)) // block_size)
    owned = -(-max_model_len // block_size)
    n = draw(st.integers(1, 5))
    blocks = [[1 + r * owned + i if i < owned else 0 for i in range(width)] for r in range(n)]
    starts = draw(st.lists(st.integers(0, max_model_len - 1), min_size=n, max_size=n))
    counts = draw(st.lists(st.integers(0, steps + 1), min_size=n, max_size=n))
    tokens = draw(st.lists(st.lists(st.integers(-1, 50), min_size=steps + 1, max_size=steps + 1), min_size=n,
                           max_size=n))  # fmt: skip
    return block_size, max_model_len, steps, blocks, starts, counts, tokens


@given(batches())
def test_begin_propose(batch):
    block_size, max_model_len, steps, blocks, starts, counts, tokens = batch
    n, q = len(starts), steps + 1
    out = {
        "token_ids": ints(n * q),
        "positions": ints(n * q),
        "slot_mapping": ints(n * q),
        "seq_lens": ints(n, dtype=torch.int32),
        "last_rows": ints(n),
        "step_positions": ints(n),
        "step_seq_lens": ints(n, dtype=torch.int32),
        "draft_step": ints(1),
    }
    ops.begin_propose(
        torch.tensor(tokens),
        torch.tensor(counts, dtype=torch.int32),
        torch.tensor(starts),
        torch.tensor(blocks, dtype=torch.int32),
        max_model_len=max_model_len,
        block_size=block_size,
        **out,
    )
    wanted = {name: [] for name in out} | {"draft_step": [0]}
    for r, (start, count) in enumerate(zip(starts, counts, strict=True)):
        live = count > 0
        for i in range(q):
            wanted["token_ids"].append(tokens[r][i] if i < count else 0)
            wanted["positions"].append(min(start + i, max_model_len - 1) if live else 0)
            wanted["slot_mapping"].append(naive_slot(start + i, blocks[r], live, max_model_len, block_size))
        wanted["seq_lens"].append(start + q if live else 0)
        wanted["last_rows"].append(r * q + max(count - 1, 0))
        wanted["step_seq_lens"].append(start + count if live else 0)
        wanted["step_positions"].append(min(start + count - 1, max_model_len - 1) if live else 0)
    assert {name: tensor.tolist() for name, tensor in out.items()} == wanted


@given(batches())
def test_begin_verify(batch):
    block_size, max_model_len, steps, blocks, starts, counts, tokens = batch
    n, q = len(starts), steps + 1
    starts = [start if count else -1 for start, count in zip(starts, counts, strict=True)]
    last = [max(row[0], 0) for row in tokens]
    drafts = [row[1:] for row in tokens]
    out = {
        "token_ids": ints(n * q),
        "positions": ints(n * q),
        "slot_mapping": ints(n * q),
        "seq_lens": ints(n, dtype=torch.int32),
    }
    ops.begin_verify(
        torch.tensor(last),
        torch.tensor(drafts),
        torch.tensor(starts),
        torch.tensor(blocks, dtype=torch.int32),
        max_model_len=max_model_len,
        block_size=block_size,
        **out,
    )
    wanted = {name: [] for name in out}
    for r, start in enumerate(starts):
        live = start >= 0
        for i, token in enumerate([last[r], *drafts[r]]):
            wanted["token_ids"].append(max(token, 0) if live else 0)
            wanted["positions"].append(min(start + i, max_model_len - 1) if live else 0)
            wanted["slot_mapping"].append(naive_slot(start + i, blocks[r], live, max_model_len, block_size))
        wanted["seq_lens"].append(start + q if live else 0)
    assert {name: tensor.tolist() for name, tensor in out.items()} == wanted


def test_begin_verify_without_drafts_is_plain_decoding():
    out = [ints(2), ints(2), ints(2), ints(2, dtype=torch.int32)]
    ops.begin_verify(
        torch.tensor([7, 8]),
        torch.empty(2, 0, dtype=torch.int64),
        torch.tensor([5, -1]),
        torch.tensor([[3, 1], [2, 2]], dtype=torch.int32),
        max_model_len=8,
        block_size=4,
        token_ids=out[0],
        positions=out[1],
        slot_mapping=out[2],
        seq_lens=out[3],
    )
    assert [t.tolist() for t in out] == [[7, 0], [5, 0], [1 * 4 + 1, -1], [6, 0]]


def test_no_two_requests_ever_share_a_slot():
    """Live rows of different requests, and of one request, write different slots; inert ones write none."""
    n, q, block_size, max_model_len = 4, 6, 4, 24
    table = (1 + torch.arange(n * 10).view(n, 10)).int()
    slots = ints(n * q)
    ops.begin_propose(
        torch.zeros(n, q, dtype=torch.int64),
        torch.tensor([1, 0, 6, 3], dtype=torch.int32),
        torch.tensor([0, 9, 17, 22]),
        table,
        max_model_len=max_model_len,
        block_size=block_size,
        token_ids=ints(n * q),
        positions=ints(n * q),
        slot_mapping=slots,
        seq_lens=ints(n, dtype=torch.int32),
        last_rows=ints(n),
        step_positions=ints(n),
        step_seq_lens=ints(n, dtype=torch.int32),
        draft_step=ints(1),
    )
    written = [slot for slot in slots.tolist() if slot >= 0]
    assert len(written) == len(set(written)) == 6 + 0 + 6 + 2
