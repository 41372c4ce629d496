"""Rounds in which nobody joins or ends: their tokens are kept as one array per round, and taken apart when needed.

Such a round costs the host a few operations over whole arrays, however many requests run. What is put off is done once
for several rounds, where a request ends, or when a caller reads the chunks of a round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np

from specgraph.decoding.request import Chunk, Running
from specgraph.decoding.round_outputs import RoundOutput

MOST_ROUNDS = 16
"""Rounds that are taken apart together, at most. It bounds their memory, and how long the host is away for them: of 64
requests less than a round takes."""


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
    """The rounds over the same requests that were handed out and are not in `Running.token_ids` yet."""

    def __init__(self) -> None:
        self._rows: list[Running | None] = []
        self._live: list[int] | None = None
        """The rows that have a request; None where all have."""
        self._query_len = 0
        self._stops = np.zeros(0, np.int64)
        self._outputs: list[RoundOutput] = []
        self.left = 0
        """No request has fewer tokens left than this; 0 where it is not known."""

    def take(self, rows: list[Running | None], output: RoundOutput, query_len: int) -> list[int] | None:
        """Keep a round, unless a request may have ended in it or a count is impossible.

        Args:
            rows: who was in which row.
            query_len: rows per request: how the tokens are packed.

        Returns:
            The counts of the requests that ran; None where the round was not kept: the caller then calls `fold`, and
            looks at each request.
        """
        if query_len != self._query_len or rows != self._rows or not self.left:
            self._begin(rows, query_len)
        counts = output.counts
        if self._live is not None:
            counts = [counts[row] for row in self._live]
        most = max(counts, default=0)
        if min(counts, default=0) < 1 or most > query_len:
            return None
        if most >= self.left:
            self.fold()
            self._count_left()
        if most >= self.left:
            return None
        if len(self._stops):
            tokens = np.frombuffer(output.token_ids, np.int64)
            if (tokens == self._stops).any():  # there are none of them behind the tokens that were sampled: -1 is
                return None
        self.left -= most
        self._outputs.append(output)
        if len(self._outputs) == MOST_ROUNDS:
            self._append()
        return counts

    def fold(self) -> None:
        """Bring `Running.token_ids` up to date. Whoever appends to them afterwards ends this run of rounds."""
        self._append()
        self.left = 0

    def _begin(self, rows: list[Running | None], query_len: int) -> None:
        self._append()
        self._rows, self._query_len = rows, query_len
        self._live = [row for row, state in enumerate(rows) if state is not None] if None in rows else None
        stops = frozenset[int]().union(*(state.stops for state in rows if state is not None))
        self._stops = np.array(sorted(stops), np.int64)[:, None]
        self._count_left()

    def _count_left(self) -> None:
        left = (state.limit - len(state.token_ids) for state in self._rows if state is not None)
        self.left = min(left, default=0)

    def _append(self) -> None:
        """Append what the rounds sampled to each request's tokens: one gather over all rounds and requests."""
        if not self._outputs:
            return
        q, n, rounds = self._query_len, len(self._rows), len(self._outputs)
        packed = np.frombuffer(b"".join([output.token_ids for output in self._outputs]), np.int64)
        tokens = packed.reshape(rounds, n, q).transpose(1, 0, 2)
        counts = np.array([output.counts for output in self._outputs]).T
        given = tokens[np.arange(q) < counts[:, :, None]].tolist()
        start = 0
        for state, end in zip(self._rows, counts.sum(axis=1).cumsum().tolist(), strict=True):
            if state is not None:
                state.token_ids += given[start:end]
            start = end
        self._outputs.clear()
