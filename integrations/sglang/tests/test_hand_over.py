"""The hand-over of a round against a loop over requests and rows."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from specgraph_sglang.round_end import RoundEnd, fill_round_reference

from specgraph import ProposeBatch

MAX_LEN, PAGE, WIDTH, AUX = 40, 4, 13, 6


@st.composite
def round_ends(draw):
    """(RoundEnd, K): random counts, positions up to the context's end, request slots in any order, stale slots."""
    k, n = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    g = torch.Generator().manual_seed(draw(st.integers(0, 1 << 20)))
    q, columns = k + 1, draw(st.sampled_from([36, 40, 53]))
    pages = torch.randint(1, 50, (8, -(-columns // PAGE)), generator=g)
    table = (pages[:, :, None] * PAGE + torch.arange(PAGE)).flatten(1)[:, :columns]
    return RoundEnd(
        next_token_ids=torch.randint(0, 99, (n * q,), generator=g).int(),
        accept_lens=torch.tensor([draw(st.integers(1, q)) for _ in range(n)]).int(),
        seq_lens=torch.tensor([draw(st.integers(0, MAX_LEN - q)) for _ in range(n)]),
        req_pool_indices=torch.tensor(draw(st.permutations(range(8)))[:n]),
        req_to_token=table.int(),
        hidden_states=torch.randn(n * q, AUX, generator=g),
    ), k


@given(round_ends(), st.integers(0, 2))
def test_every_request_gets_its_own(made, padding) -> None:
    end, k = made
    n, q = end.num_requests, k + 1
    into = ProposeBatch(
        sampled_token_ids=torch.full((n + padding, q), -9),
        num_sampled=torch.full((n + padding,), -9, dtype=torch.int32),
        start_positions=torch.full((n + padding,), -9),
        aux_hidden=torch.full(((n + padding) * q, AUX), -9.0),
        block_table=torch.full((n + padding, WIDTH), -9, dtype=torch.int32),
    )
    fill_round_reference(end, into, MAX_LEN, PAGE)
    for r in range(n):
        count, start = int(end.accept_lens[r]), int(end.seq_lens[r])
        assert into.sampled_token_ids[r, :count].tolist() == end.next_token_ids[r * q : r * q + count].tolist()
        assert (int(into.num_sampled[r]), int(into.start_positions[r])) == (count, start)
        assert torch.equal(into.aux_hidden[r * q : (r + 1) * q], end.hidden_states[r * q : (r + 1) * q])
        # The last position that this propose can write: K + 1 rows, then K - 1 more steps after the last accepted one.
        slots = end.req_to_token[int(end.req_pool_indices[r])].tolist()
        last = min(start + 2 * k, MAX_LEN - 1)
        want = [slots[p] // PAGE for p in range(0, min(last + 1, len(slots)), PAGE)]
        assert into.block_table[r].tolist() == (want + [0] * WIDTH)[:WIDTH]
    assert into.num_sampled[n:].tolist() == [0] * padding
