"""The hand-over against a loop over requests and rows."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specgraph_vllm.round_end import RoundEnd, fill_round_reference

from specgraph import ProposeBatch

MAX_LEN, BLOCK, WIDTH = 40, 4, 13


@st.composite
def round_ends(draw):
    """(RoundEnd, K): random counts, positions up to the model's end, request slots in any order, stale tables."""
    k, n = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    g = torch.Generator().manual_seed(draw(st.integers(0, 1 << 20)))
    q, slots = k + 1, draw(st.permutations(range(8)))[:n]
    starts = [draw(st.integers(0, MAX_LEN - q)) for _ in range(n)]
    rows, columns = n * q + draw(st.integers(0, 7)), draw(st.sampled_from([9, 10, 16]))
    return RoundEnd(
        input_ids=torch.randint(0, 99, (rows,), generator=g).int(),
        positions=torch.cat([torch.arange(s, s + q) for s in starts] + [torch.zeros(rows - n * q).long()]),
        num_sampled=torch.tensor([draw(st.integers(1, q)) for _ in range(n)]).int(),
        last_sampled=torch.randint(100, 200, (8, 1), generator=g),
        idx_mapping=torch.tensor(slots).int(),
        block_table=torch.randint(1, 50, (n + 2, columns), generator=g).int(),
        hidden_states=[torch.randn(rows, 3, generator=g) for _ in range(draw(st.integers(1, 4)))],
    ), k


def garbage(n: int, k: int, aux: int) -> ProposeBatch:
    q = k + 1
    return ProposeBatch(
        sampled_token_ids=torch.full((n, q), -9),
        num_sampled=torch.full((n,), -9, dtype=torch.int32),
        start_positions=torch.full((n,), -9),
        aux_hidden=torch.full((n * q, aux), -9.0),
        block_table=torch.full((n, WIDTH), -9, dtype=torch.int32),
    )


@settings(deadline=None, derandomize=True)
@given(round_ends(), st.integers(0, 2))
def test_every_request_gets_its_own(made, padding) -> None:
    end, k = made
    n, q = end.num_requests, k + 1
    into = garbage(n + padding, k, 3 * len(end.hidden_states))
    fill_round_reference(end, into, MAX_LEN, BLOCK)
    for r in range(n):
        count, start = int(end.num_sampled[r]), int(end.positions[r * q])
        want = [int(end.input_ids[r * q + 1 + j]) for j in range(count - 1)]
        want.append(int(end.last_sampled[int(end.idx_mapping[r]), 0]))
        assert into.sampled_token_ids[r].tolist() == want + [0] * (q - count)
        assert int(into.num_sampled[r]) == count
        assert int(into.start_positions[r]) == start
        for j in range(q):
            want_aux = [x for states in end.hidden_states for x in states[r * q + j].tolist()]
            assert into.aux_hidden[r * q + j].tolist() == want_aux
        # The last slot that this propose can write: K + 1 rows, then K - 1 more steps after the last accepted one.
        last = min(start + 2 * k, MAX_LEN - 1)
        blocks = last // BLOCK + 1
        row = end.block_table[r].tolist()
        assert into.block_table[r].tolist() == (row[:blocks] + [0] * WIDTH)[:WIDTH]
    assert into.num_sampled[n:].tolist() == [0] * padding
