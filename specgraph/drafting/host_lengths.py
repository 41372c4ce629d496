"""The lengths of each draft step as host integers, for attention that takes them so."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specgraph.attention import HostLengths
from specgraph.drafting.buffers import DraftBuffers
from specgraph.graphs import BatchDescriptor
from specgraph.platforms import Platform


@dataclass(frozen=True, slots=True)
class HostRound:
    """The numbers of one round that a draft program makes host lengths from."""

    start_positions: Sequence[int]
    """Position of each real request's first row in the target's pass."""
    num_sampled: Callable[[], Sequence[int]]
    """Accepted + 1 of each real request. The host doesn't know it when the propose is launched: calling may wait."""
    query_len: int
    """Rows a request in the target's pass."""
    num_speculative_tokens: int
    padded: int
    """Requests of the graph; those beyond the real ones get length 0."""

    def lengths(self, rows: int, seq_lens: Sequence[int]) -> HostLengths:
        """`rows` for every request, `seq_lens` for the real ones and 0 for the padded."""
        tail = [0] * (self.padded - len(self.start_positions))
        return HostLengths(query_lens=[rows] * self.padded, seq_lens=[*seq_lens, *tail])

    def first(self) -> HostLengths:
        """Every row of the target's pass; needs no accepted count."""
        return self.lengths(self.query_len, [start + self.query_len for start in self.start_positions])

    def accepted_ends(self) -> list[int]:
        """One past the last accepted row's position: this round's rejected tokens are counted out."""
        counts = self.num_sampled()[: len(self.start_positions)]
        return [start + count for start, count in zip(self.start_positions, counts, strict=True)]


@dataclass(frozen=True)
class LateLengths(Mapping[int, HostLengths]):
    """The lengths of one launch by captured step, each computed when it is asked for: later ones may have to wait."""

    at: Callable[[int], HostLengths]
    """The lengths of a draft step."""
    steps: Mapping[int, int]
    """Draft step by the step it was captured as."""

    def __getitem__(self, captured: int) -> HostLengths:
        return self.at(self.steps[captured])

    def __contains__(self, captured: object) -> bool:
        return captured in self.steps  # Mapping's own would ask for the lengths, and wait

    def __iter__(self) -> Iterator[int]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)


class HostRounds:
    """Brings to the host what attention with host parameters needs of a round, and no sooner than it is needed."""

    def __init__(self, platform: Platform, max_num_requests: int) -> None:
        self._accepted = AcceptedCounts(platform, max_num_requests)

    def round(
        self,
        batch: BatchDescriptor,
        buffers: DraftBuffers,
        start_positions: Sequence[int] | None,
        num_sampled: Sequence[int] | None,
    ) -> HostRound:
        """The round that stands in `buffers`; what is not given as host integers is read from them."""
        if start_positions is None:
            counts: list[int] = buffers.num_sampled[: batch.num_requests].tolist()
            live = max((i + 1 for i, count in enumerate(counts) if count > 0), default=0)
            start_positions, num_sampled = buffers.start_positions[:live].tolist(), counts[:live]
        given = num_sampled
        if given is None:
            self._accepted.start(buffers.num_sampled[: len(start_positions)])
        read = self._accepted.read if given is None else lambda: given
        return HostRound(start_positions, read, batch.query_len, batch.num_speculative_tokens, batch.num_requests)


class AcceptedCounts:
    """This round's accepted counts on their way to the host: one asynchronous copy, waited for when they are read.

    The copy is ordered before the propose on the same stream, so reading waits for the target's round and not for the
    propose.
    """

    def __init__(self, platform: Platform, max_num_requests: int) -> None:
        pinned = platform.device.type != "cpu"
        self._host = torch.zeros(max_num_requests, dtype=torch.int32, device="cpu", pin_memory=pinned)
        self._platform, self._copied = platform, platform.event()
        self._counts: list[int] | None = None
        self._size = 0

    def start(self, num_sampled: Tensor) -> None:
        """Begin to copy int32 [n] to the host."""
        self._size, self._counts = num_sampled.shape[0], None
        self._host[: self._size].copy_(num_sampled, non_blocking=True)
        self._copied.record(self._platform.current_stream())

    def read(self) -> list[int]:
        """The counts; waits until they are there."""
        if self._counts is None:
            self._copied.synchronize()
            self._counts = self._host[: self._size].tolist()
        return self._counts
