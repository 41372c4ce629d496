"""The lengths of each draft step as host integers, for attention that takes them so."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from specgraph.attention import HostLengths
from specgraph.drafting.buffers import DraftBuffers
from specgraph.drafting.transfers import HostCopy
from specgraph.graphs import BatchDescriptor
from specgraph.platforms import Platform

Counts = Sequence[int] | Callable[[], Sequence[int]]
"""Accepted + 1 of each request. The host doesn't know it when a propose is launched: asking for it may wait."""


@dataclass(frozen=True, slots=True)
class HostRound:
    """The numbers of one round that a draft program makes host lengths from."""

    start_positions: Sequence[int]
    """Position of each real request's first row in the target's pass."""
    num_sampled: Counts
    """Accepted + 1 of each real request."""
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
        counts = self.num_sampled() if callable(self.num_sampled) else self.num_sampled
        real = counts[: len(self.start_positions)]
        return [start + count for start, count in zip(self.start_positions, real, strict=True)]


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
        self._accepted = HostCopy(platform, max_num_requests, torch.int32)

    def round(
        self,
        batch: BatchDescriptor,
        buffers: DraftBuffers,
        start_positions: Sequence[int] | None,
        num_sampled: Counts | None,
    ) -> HostRound:
        """The round that stands in `buffers`; what is not given as host integers is read from them.

        The copy that this takes is ordered before the propose in the stream, so reading it waits for the target's round
        and not for the propose.
        """
        if start_positions is None:
            counts: list[int] = buffers.num_sampled[: batch.num_requests].tolist()
            live = max((i + 1 for i, count in enumerate(counts) if count > 0), default=0)
            start_positions, num_sampled = buffers.start_positions[:live].tolist(), counts[:live]
        if num_sampled is None:
            self._accepted.start(buffers.num_sampled[: len(start_positions)])
            num_sampled = self._read
        return HostRound(
            start_positions, num_sampled, batch.query_len, batch.num_speculative_tokens, batch.num_requests
        )

    def _read(self) -> list[int]:
        return self._accepted.read().tolist()
