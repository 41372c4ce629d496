"""Rounds in which nobody joins or ends: their tokens are kept as one array per round, and taken apart when needed.

Such a round costs the host a few operations over whole arrays, however many requests run. What is put off is done once
for several rounds, where a request ends, or when a caller reads the chunks of a round.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

from specgraph.engine.metrics import AcceptanceMetrics
from specgraph.engine.request import Chunk, Running
from specgraph.engine.round_outputs import ReadRound
from specgraph.errors import SpecgraphError

MOST_KEPT = 2048
"""Rounds times requests that are taken apart together, at most. It bounds their memory, and how long the host is away
for them: less than a round of 64 requests takes."""

_LOW_BYTES = slice(0 if sys.byteorder == "little" else 3, None, 4)
"""Of int32 counts: all of a number that is less than 256."""

_ONE_LESS = bytes([0, *range(255)])
"""Turns counts into accepted drafts, which are one less."""


class RoundChunks(Sequence[Chunk]):
    """The chunks of a round, one for each request that ran, which are made when they are read first."""

    def __init__(self, read: ReadRound, num_requests: int) -> None:
        """
        Args:
            read: a round in which nobody ended.
            num_requests: in its rows.
        """
        self._read, self._num_requests = read, num_requests
        self._made: list[Chunk] | None = None

    def _chunks(self) -> list[Chunk]:
        if self._made is None:
            tokens, q = self._read.tokens(), self._read.query_len
            self._made = [
                Chunk(state.index, tokens[row * q : row * q + count], count - 1)
                for row, (state, count) in enumerate(zip(self._read.rows, self._read.num_sampled(), strict=True))
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
        self._stops: NDArray[np.int64] | None = None
        self._token_ids: list[bytes] = []
        self._counts: list[bytes] = []
        self.left = 0
        """No request has fewer tokens left than this; 0 where it is not known."""

    def take(self, read: ReadRound) -> bytes | None:
        """Keep a round, unless a request may have ended in it or a count is impossible.

        Returns:
            How many tokens each request that ran sampled; None where the round was not kept: the caller then calls
            `end`, and looks at each request.
        """
        if read.query_len != self._query_len or read.rows is not self._rows or not self.left:
            self._begin(read.rows, read.query_len)
        counts = all_counts = read.counts[_LOW_BYTES]
        if self._live is not None:
            counts = bytes([counts[row] for row in self._live])
        if counts.translate(None, self._possible) or read.counts.count(0) < 3 * len(all_counts):
            return None
        most = self._query_len
        if most >= self.left:
            self.fold()
            self._count_left()
            most = max(counts, default=0)
            if most >= self.left:
                return None
        if self._stops is not None:
            tokens = np.frombuffer(read.token_ids, np.int64)
            if (tokens == self._stops).any():  # there are none of them behind the tokens that were sampled: -1 is
                return None
        self.left -= most
        self._token_ids.append(read.token_ids)
        self._counts.append(all_counts)
        if len(self._counts) == self._most:
            self.fold()
        return counts

    def end(self) -> None:
        """`fold`, where others append to `Running.token_ids` afterwards."""
        self.fold()
        self.left = 0

    def _begin(self, rows: list[Running | None], query_len: int) -> None:
        self.end()
        self._rows, self._query_len, self._possible = rows, query_len, bytes(range(1, min(query_len, 255) + 1))
        self._most = max(1, MOST_KEPT // len(rows)) if rows else 1
        self._live = [row for row, state in enumerate(rows) if state is not None] if None in rows else None
        stops = frozenset[int]().union(*(state.stops for state in rows if state is not None))
        self._stops = np.array(sorted(stops), np.int64)[:, None] if stops else None
        self._count_left()

    def _count_left(self) -> None:
        self.left = min((state.num_left for state in self._rows if state is not None), default=0)

    def fold(self) -> None:
        """Bring `Running.token_ids` and the metrics up to date: one gather over all rounds and requests that are kept.

        Raises:
            SpecgraphError: a round has more or fewer tokens than its counts say.
        """
        if not self._counts:
            return
        q, n, rounds = self._query_len, len(self._rows), len(self._counts)
        packed = np.frombuffer(b"".join(self._token_ids), np.int64).reshape(rounds, n, q)
        by_request = packed.transpose(1, 0, 2).ravel()
        given = by_request.compress(by_request >= 0).view(np.uint8).data
        all_counts = b"".join(self._counts)
        counts = np.frombuffer(all_counts, np.uint8).reshape(rounds, n)
        sampled, start = np.add.reduce(counts, 0, np.int64).tolist(), 0
        if len(given) != 8 * sum(sampled):
            raise SpecgraphError(
                f"{rounds} rounds of {n} requests have {len(given) // 8} tokens, and by their counts {sum(sampled)}: "
                "something else than -1 follows the tokens of a request; a bug of specgraph or of the backend's kernels"
            )
        for state, count in zip(self._rows, sampled, strict=True):
            end = start + 8 * count
            if state is not None:
                state.token_ids.frombytes(given[start:end])
            start = end
        if self._live is not None:
            all_counts = counts[:, self._live].tobytes()
        self._metrics.rounds += rounds
        if q > 1:
            self._metrics.observe(all_counts.translate(_ONE_LESS), q - 1)
        self._token_ids.clear()
        self._counts.clear()
