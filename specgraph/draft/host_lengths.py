"""The sequence lengths of each draft step as host integers, for attention with host parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import index

import torch

from specgraph.attention import HostLengths
from specgraph.capture import BatchDescriptor, HostCopy
from specgraph.device import Platform
from specgraph.draft.batch import ProposeBatch
from specgraph.errors import ConfigError
from specgraph.ops.begin_rows import RowPlan
from specgraph.validation import shown

Counts = Sequence[int] | Callable[[], Sequence[int]]
"""`num_sampled` of each request, or a function that returns it. The host may not know the numbers when it launches a
propose; the function may then wait for the target's pass."""


@dataclass(frozen=True, slots=True)
class HostNumbers:
    """The numbers of one batch. A draft program computes host lengths from them."""

    start_positions: Sequence[int]
    """Position of each real request's first row in the target's pass."""
    num_sampled: Counts
    """`ProposeBatch.num_sampled` of each real request."""
    query_len: int
    num_speculative_tokens: int
    padded: int
    """Requests of the graph, padding included. Padding has length 0."""

    def first(self, plan: RowPlan) -> HostLengths:
        """Return the lengths of draft step 0.

        An inert request has length 0, as on the device. One exception saves a wait: if no length depends on the counts
        and the host doesn't know them yet, every request gets the length of a live one. That does no harm: the rows of
        an inert request have no slots, and their results are ignored.
        """
        waits = callable(self.num_sampled) and not plan.after_sampled
        counts = [1] * len(self.start_positions) if waits else self.counts()
        return self.lengths(plan.rows, [plan.seq_len(*request) for request in self._requests(counts)])

    def later(self, plan: RowPlan, step: int) -> HostLengths:
        """Return the lengths of a later draft step of one row per request, `step` tokens past the last sampled one."""
        ends = [plan.step_seq_len(*request) for request in self._requests(self.counts())]
        return self.lengths(1, [end + step if end else 0 for end in ends])

    def counts(self) -> Sequence[int]:
        """Return `num_sampled` of each real request as integers. This may wait for the target's pass."""
        counts = self.num_sampled() if callable(self.num_sampled) else self.num_sampled
        return _integers("host_num_sampled", counts, len(self.start_positions))

    def _requests(self, counts: Sequence[int]) -> Iterable[tuple[int, int]]:
        return zip(self.start_positions, counts, strict=True)

    def lengths(self, rows: int, seq_lens: Sequence[int]) -> HostLengths:
        return HostLengths([rows] * self.padded, [*seq_lens, *[0] * (self.padded - len(seq_lens))])


def _integers(name: str, given: Sequence[int], most: int) -> Sequence[int]:
    """Return at most `most` of the caller's numbers as Python integers. Raises ConfigError if they are no integers."""
    try:
        return [index(each) for each in given[:most]]
    except TypeError:
        raise ConfigError(f"{name} must be a list of integers, one per request, got {shown(given)}") from None


class HostNumbersReader:
    """Brings the numbers that attention with host parameters needs to the host, as late as possible."""

    def __init__(self, platform: Platform, max_num_requests: int) -> None:
        self._accepted = HostCopy(platform, max_num_requests, torch.int32)

    def read(
        self,
        batch: BatchDescriptor,
        buffers: ProposeBatch,
        start_positions: Sequence[int] | None,
        num_sampled: Counts | None,
    ) -> HostNumbers:
        """Return the numbers of the batch in `buffers`. Numbers that are not given as host integers are copied from it.

        The copy is queued in the stream before the propose, so reading it waits for the target's pass only.
        """
        if start_positions is None:
            counts: list[int] = buffers.num_sampled[: batch.num_requests].tolist()
            live = max((i + 1 for i, count in enumerate(counts) if count > 0), default=0)
            start_positions, num_sampled = buffers.start_positions[:live].tolist(), counts[:live]
        else:
            start_positions = _integers("host_start_positions", start_positions, buffers.num_requests)
        if num_sampled is None:
            self._accepted.start(buffers.num_sampled[: len(start_positions)])
            num_sampled = self._read
        return HostNumbers(
            start_positions, num_sampled, batch.query_len, batch.num_speculative_tokens, batch.num_requests
        )

    def _read(self) -> list[int]:
        return self._accepted.read().tolist()
