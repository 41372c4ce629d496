"""The ops between two rounds, against one Python integer at a time."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from specgraph import ops


@st.composite
def requests(draw):
    """Rows of one batch: sampled tokens, their count, tokens that remain, stop tokens, position, drafts."""
    k, token = draw(st.integers(0, 4)), st.integers(0, 6)
    row = st.tuples(
        st.lists(st.integers(-1, 6), min_size=k + 1, max_size=k + 1),
        st.integers(0, k + 1),
        st.integers(0, 8),
        st.lists(token, max_size=3),
        st.integers(0, 50),
        st.lists(token, min_size=k, max_size=k),
    )
    return draw(st.lists(row, min_size=1, max_size=5))


@given(requests())
def test_stop_finished(rows):
    sampled, counts, remaining = (torch.tensor([row[i] for row in rows]) for i in range(3))
    counts, stops = counts.int(), torch.tensor([[*row[3], *[-1] * (3 - len(row[3]))] for row in rows])
    ops.stop_finished(sampled, counts, remaining, stops)
    for i, (tokens, count, left, stop, _, _) in enumerate(rows):
        finished = count >= left or any(token in stop for token in tokens[:count])
        assert (counts[i], remaining[i]) == (0 if finished else count, max(left - count, 0))


@given(requests())
def test_next_verify(rows):
    sampled, counts, starts = (torch.tensor([row[i] for row in rows]) for i in (0, 1, 4))
    drafts = torch.tensor([row[5] for row in rows], dtype=torch.int64)
    last, copied = torch.full((len(rows),), 99), torch.full_like(drafts, 99)
    ops.next_verify(sampled, counts.int(), drafts, starts, last, copied)
    for i, (tokens, count, _, _, start, _) in enumerate(rows):
        assert (last[i], starts[i]) == ((tokens[count - 1], start + count) if count else (0, -1))
    assert copied.equal(drafts)


@given(st.lists(requests(), min_size=1, max_size=5), st.integers(1, 3), st.integers(1, 4))
def test_publish_round(rounds, slots, rounds_per_launch):
    """Rounds one after the other, each with a batch of its own."""
    ring, progress, again = torch.full((slots, 6), -9), torch.zeros(2, dtype=torch.int64), torch.ones(1).int()
    expected, done = ring.tolist(), 0
    for i, rows in enumerate(rounds):
        sampled, counts, remaining = (torch.tensor([row[c] for row in rows]) for c in range(3))
        stops = torch.tensor([[*row[3], *[-1] * (3 - len(row[3]))] for row in rows])
        results = torch.arange(4) + 100 * i
        ops.publish_round(
            results, sampled, counts.int(), remaining, stops, ring, progress, again, rounds_per_launch
        )  # fmt: skip
        live = [0 < c < left and not set(t[:c]) & set(stop) for t, c, left, stop, _, _ in rows]
        done += 1
        goes_on = any(live) and done < rounds_per_launch
        expected[i % slots] = [*results.tolist(), i + 1, int(goes_on)]
        assert (ring.tolist(), again.item()) == (expected, int(goes_on))
        done *= goes_on
