"""What rounds sampled, on its way to the host: a ring of slots that the rounds' graphs write themselves.

Where the device can write host memory, the ring is there, and the host only waits for an event. Elsewhere the ring is
device memory, and one copy follows each launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specgraph import kernels
from specgraph.drafting import ProposeBatch, RoundBuffers
from specgraph.errors import SpecgraphError
from specgraph.platforms import Platform
from specgraph.runner import HostCopy


@dataclass(frozen=True, slots=True)
class RoundOutput:
    """One round that the host has read."""

    number: int
    """Counted from 1 over all rounds of the decoder; 0 is none."""
    token_ids: list[list[int]]
    """[n][counts]: what each request sampled."""
    counts: list[int]
    """[n]; 0 for requests that were inert."""
    is_last: bool
    """No further round of the same launch follows."""


NO_ROUND = RoundOutput(0, [], [], is_last=True)


class RoundOutputs:
    """The ring of one decoder, and the first tokens of requests that joined."""

    def __init__(self, platform: Platform, memory: RoundBuffers, rounds_per_launch: int, num_in_flight: int) -> None:
        """
        Args:
            memory: where rounds leave their results.
            rounds_per_launch: the most that a launch may have.
            num_in_flight: launches whose rounds may be unread at one time.
        """
        self.memory = memory
        self.num_slots = rounds_per_launch * num_in_flight
        words, requests, device = memory.results.numel(), memory.num_sampled.numel(), platform.device
        size = self.num_slots * (words + 2) + num_in_flight * requests
        mapped = platform.mapped_memory(size, torch.int64)
        written, on_host = (torch.zeros(size, dtype=torch.int64, device=device), None) if mapped is None else mapped
        self._words, self._written = words, written
        self._first_token_ids = written[self.num_slots * (words + 2) :].view(num_in_flight, requests)
        self.ring = written[: self.num_slots * (words + 2)].view(self.num_slots, words + 2)
        """int64 [slots, words + 2]; see `kernels.publish_round`."""
        self.progress = torch.zeros(2, dtype=torch.int64, device=device)
        self.again = torch.zeros(1, dtype=torch.int32, device=device)
        """int32 [1]: whether the launch under way has another round."""
        self._free = [HostCopy(platform, size, torch.int64, on_host) for _ in range(num_in_flight)]
        self._num_read = self._num_sent = self._num_received = 0

    def named_tensors(self) -> dict[str, Tensor]:
        """What the rounds' graphs touch, by name."""
        return {"round.outputs": self._written, "round.progress": self.progress, "round.again": self.again}

    def publish(self, batch: ProposeBatch, remaining: Tensor, stop_token_ids: Tensor, rounds_per_launch: int) -> None:
        """Write what a round sampled; the last work of every round. See `kernels.publish_round`."""
        kernels.publish_round(
            self.memory.results, batch.sampled_token_ids, batch.num_sampled, remaining, stop_token_ids, self.ring,
            self.progress, self.again, rounds_per_launch,
        )  # fmt: skip

    def send(self) -> HostCopy:
        """Queue, after a launch and the requests that joined after it, what the host will wait for."""
        copy = self._free.pop()
        copy.start(self._written)
        self._num_sent += 1
        return copy

    @property
    def first_token_ids(self) -> Tensor:
        """int64 [R]: the tokens after the prompts of requests that join before the next `send`, by row."""
        return self._first_token_ids[self._num_sent % self._first_token_ids.shape[0]]

    def receive(self, copy: HostCopy) -> Tensor:
        """Wait for what was sent: what `round` and `first_tokens` take. Overwritten from the next launch on."""
        received = copy.read()
        self._free.append(copy)
        self._num_received += 1
        return received

    def first_tokens(self, received: Tensor) -> Tensor:
        """int64 [R]: the first tokens by row, in what was received last."""
        places, requests = self._first_token_ids.shape
        start = self.num_slots * (self._words + 2) + (self._num_received - 1) % places * requests
        return received[start : start + requests]

    def round(self, received: Tensor, num_requests: int, query_len: int) -> RoundOutput:
        """The next round that was not read.

        Raises:
            SpecgraphError: a later round has overwritten it.
        """
        start, rows = self._num_read % self.num_slots * (self._words + 2), num_requests * query_len
        behind, end = start + self.memory.sampled_token_ids.shape[0], start + self._words
        number, again = received[end : end + 2].tolist()
        if number != self._num_read + 1:
            raise SpecgraphError(
                f"slot {self._num_read % self.num_slots} of the ring holds round {number} where round "
                f"{self._num_read + 1} was to be read: more rounds were launched than the ring has slots; a bug of "
                "specgraph"
            )
        self._num_read += 1
        tokens: list[int] = received[start : start + rows].tolist()
        counts: list[int] = received[behind:end].view(torch.int32)[:num_requests].tolist()
        by_request = [tokens[at : at + count] for at, count in zip(range(0, rows, query_len), counts, strict=True)]
        return RoundOutput(number, by_request, counts, is_last=not again)
