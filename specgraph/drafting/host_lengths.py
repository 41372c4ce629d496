"""The lengths of each draft step as host integers, for attention that takes them so."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specgraph.attention import HostLengths
from specgraph.platforms import Platform


def draft_lengths(
    start_positions: Sequence[int], num_sampled: Sequence[int], step: int, query_len: int, padded: int
) -> HostLengths:
    """The same numbers as the device metadata has at `step`: this round's rejected tokens are counted out.

    Args:
        start_positions: position of each real request's first row in the target's pass.
        num_sampled: accepted + 1 of each real request.
        step: draft step; 0 runs `query_len` rows a request, later ones 1.
        query_len: K + 1.
        padded: requests of the graph; padded ones get length 0.
    """
    tail = [0] * (padded - len(start_positions))
    rows = query_len if step == 0 else 1
    if step == 0:
        seq_lens = [start + query_len for start in start_positions]
    else:
        seq_lens = [start + count + step for start, count in zip(start_positions, num_sampled, strict=True)]
    return HostLengths(query_lens=[rows] * padded, seq_lens=seq_lens + tail)


@dataclass(frozen=True)
class LateLengths(Mapping[int, HostLengths]):
    """The lengths of one propose by draft step, each computed when it is asked for.

    Step 0 needs the start positions only. The later steps need this round's accepted counts, which the host does not
    know when the propose is launched: `num_sampled` is called when the first of them is asked for, and may wait.
    """

    start_positions: Sequence[int]
    num_sampled: Callable[[], Sequence[int]]
    query_len: int
    padded: int
    steps: Mapping[int, int]
    """Draft step by the step it was captured as."""

    def __getitem__(self, captured: int) -> HostLengths:
        step, starts = self.steps[captured], self.start_positions
        counts = self.num_sampled()[: len(starts)] if step else ()
        return draft_lengths(starts, counts, step, self.query_len, self.padded)

    def __contains__(self, captured: object) -> bool:
        return captured in self.steps  # Mapping's own would ask for the lengths, and wait

    def __iter__(self) -> Iterator[int]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)


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
