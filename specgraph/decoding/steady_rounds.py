"""Rounds in which nobody joins or ends: their tokens are kept as one array per round, and taken apart when needed.

Such a round costs the host a few operations over whole arrays, however many requests run. What is put off is done once
for several rounds, where a request ends, or when a caller reads the chunks of a round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np

from specgraph.decoding.metrics import AcceptanceMetrics
from specgraph.decoding.request import Chunk, Running
from specgraph.decoding.round_outputs import RoundOutput

MOST_KEPT = 2048
"""Rounds times requests that are taken apart together, at most. It bounds their memory, and how long the host is away
for them: less than a round of 64 requests takes."""

_MOST_ROWS = 255
"""Rows per request in rounds that are kept: a count is a byte then."""

_ONE_LESS = bytes([0, *range(_MOST_ROWS)])
"""Turns counts into accepted drafts, which are one less."""


class RoundChunks(Sequence[Chunk]):
    """The chunks of a round, one for each request that ran, which are made when they are read first."""

    def __init__(self, rows: Sequence[Running | None], output: RoundOutput, query_len: int, num_requests: int) -> None:
        """
        Args:
            rows: who was in which row; nobody ended in this round.
            query_len: rows per request: how the tokens are packed.
            num_requests: in `rows`.
        """
        self._rows, self._output, self._query_len, self._num_requests = rows, output, query_len, num_requests
        self._made: list[Chunk] | None = None

    def _chunks(self) -> list[Chunk]:
        if self._made is None:
            tokens, q = self._output.tokens(), self._query_len
            self._made = [
                Chunk(state.index, tokens[row * q : row * q + count], count - 1)
                for row, (state, count) in enumerate(zip(self._rows, self._output.counts, strict=True))
                if state is not None
            ]
        return self._made

    @overload
    def __getitem__(self, index: int) -> Chunk: ...
    @overload
    def __getitem__(self, index: slice) -> list[Chunk]: ...
    def __getitem__(self, index: int | slice) -> Chunk | list[Chunk]:
        return self._chunks()[index]

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self._chunks())

    def __len__(self) -> int:
        return self._num_requests

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._chunks() == list(other)

    def __repr__(self) -> str:
        return repr(self._chunks())

    __hash__ = None  # type: ignore[assignment]


class SteadyRounds:
    """The rounds over the same requests that were handed out and are not in `Running.token_ids` and the metrics yet."""

    def __init__(self, metrics: AcceptanceMetrics) -> None:
        """metrics: count these rounds, once they are taken apart."""
        self._metrics = metrics
        self._most = 0
        """Rounds that are kept, at most."""
        self._rows: list[Running | None] = []
        self._live: list[int] | None = None
        """The rows that have a request; None where all have."""
        self._query_len = 0
        self._possible = b""
        """The counts that a request may have: 1 to query_len."""
        self._stops = np.zeros(0, np.int64)
        self._token_ids: list[bytes] = []
        self._counts: list[bytes] = []
        self.left = 0
        """No request has fewer tokens left than this; 0 where it is not known."""

    def take(self, rows: list[Running | None], output: RoundOutput, query_len: int) -> bytes | None:
        """Keep a round, unless a request may have ended in it or a count is impossible.

        Args:
            rows: who was in which row.
            query_len: rows per request: how the tokens are packed.

        Returns:
            How many drafts of each request that ran were accepted; None where the round was not kept: the caller then
            calls `fold`, and looks at each request.
        """
        if query_len > _MOST_ROWS:
            return None
        if query_len != self._query_len or rows != self._rows or not self.left:
            self._begin(rows, query_len)
        try:
            counts = all_counts = bytes(output.counts)
        except ValueError:  # less than 0, or more than a byte holds
            return None
        if self._live is not None:
            counts = bytes([counts[row] for row in self._live])
        if counts.translate(None, self._possible):
            return None
        most = query_len
        if most >= self.left:
            self._append()
            self._count_left()
            most = max(counts, default=0)
        if most >= self.left:
            return None
        if len(self._stops):
            tokens = np.frombuffer(output.token_ids, np.int64)
            if (tokens == self._stops).any():  # there are none of them behind the tokens that were sampled: -1 is
                return None
        self.left -= most
        self._token_ids.append(output.token_ids)
        self._counts.append(all_counts)
        if len(self._counts) == self._most:
            self._append()
        return counts.translate(_ONE_LESS)

    def fold(self) -> None:
        """Bring `Running.token_ids` and the metrics up to date. Whoever appends tokens afterwards ends this run of
        rounds."""
        self._append()
        for state in self._rows:
            if state is not None and state.late_token_ids:
                state.settle()
        self.left = 0

    def _begin(self, rows: list[Running | None], query_len: int) -> None:
        self.fold()
        self._rows, self._query_len, self._possible = rows, query_len, bytes(range(1, query_len + 1))
        self._most = max(1, MOST_KEPT // len(rows)) if rows else 1
        self._live = [row for row, state in enumerate(rows) if state is not None] if None in rows else None
        stops = frozenset[int]().union(*(state.stops for state in rows if state is not None))
        self._stops = np.array(sorted(stops), np.int64)[:, None]
        self._count_left()

    def _count_left(self) -> None:
        self.left = min((state.num_left for state in self._rows if state is not None), default=0)

    def _append(self) -> None:
        """Append what the rounds sampled to each request's late tokens, by one gather over all rounds and requests, and
        count what they accepted."""
        if not self._counts:
            return
        q, n, rounds = self._query_len, len(self._rows), len(self._counts)
        packed = np.frombuffer(b"".join(self._token_ids), np.int64).reshape(rounds, n, q).transpose(1, 0, 2)
        counts = np.frombuffer(b"".join(self._counts), np.uint8).reshape(rounds, n).T
        is_token = np.arange(q, dtype=np.uint8) < np.ascontiguousarray(counts)[:, :, None]
        given = np.ascontiguousarray(packed)[is_token].tobytes()
        start = 0
        for state, end in zip(self._rows, (8 * counts.sum(axis=1).cumsum()).tolist(), strict=True):
            if state is not None:
                state.late_token_ids.frombytes(given[start:end])
            start = end
        if self._live is not None:
            counts = counts[self._live]
        self._metrics.rounds += rounds
        if q > 1:
            self._metrics.observe(counts.tobytes().translate(_ONE_LESS), q - 1)
        self._token_ids.clear()
        self._counts.clear()
