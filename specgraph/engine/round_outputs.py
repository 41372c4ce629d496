"""What rounds sampled, on its way to the host: a ring of slots that the rounds' graphs write themselves.

Where the device can write host memory, the ring is there, and the host only waits for an event. Elsewhere the ring is
device memory, and one copy follows each launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specgraph import ops
from specgraph.capture import HostCopy
from specgraph.device import Platform
from specgraph.draft import ProposeBatch, RoundBuffers
from specgraph.engine.request import Running
from specgraph.errors import SpecgraphError


@dataclass(slots=True)
class ReadRound:
    """A round whose tokens the host has."""

    number: int
    """Counted from 1 over all rounds of the decoder; 0 where requests joined without a round."""
    rows: list[Running | None]
    """Who was in which row at its launch; None where nobody was, or who has left since. Never written: launches and
    rounds share it."""
    query_len: int
    """Rows per request: how its tokens are packed."""
    token_ids: bytes
    """int64 [rows * query_len]: what each request sampled, of which the first `counts` are tokens; -1 after them."""
    counts: bytes
    """int32 [rows]; 0 for requests that were inert."""
    is_last: bool
    """No further round of the same launch follows."""
    rows_without_block: int = 0
    """See `Drafter.rows_without_block`."""
    logprobs: list[list[float]] | None = None
    """[rows][query_len]: of the tokens; None unless they are asked for."""
    joined: Sequence[tuple[Running, int, int]] = ()
    """Requests that joined after it, with their row and their first token."""

    def tokens(self) -> list[int]:
        """`token_ids` as numbers."""
        return memoryview(self.token_ids).cast("q").tolist()

    def num_sampled(self) -> list[int]:
        """`counts` as numbers."""
        return memoryview(self.counts).cast("i").tolist()


class _Slot(NamedTuple):
    """The memory of one round on the host; memoryviews, whose numbers are read faster than those of tensors."""

    token_ids: memoryview[int]
    counts: memoryview[int]
    state: memoryview[int]
    """`RoundBuffers.rows_without_block`, the number of the round, and whether its launch has another one."""


@dataclass(frozen=True, slots=True)
class HostRing:
    """The ring on the host, as one launch in flight left it, and what waits for it."""

    number: int
    """Launches in flight have these in turn."""
    copy: HostCopy
    slots: list[_Slot]
    first_token_ids: list[memoryview[int]]
    """By `number`: of requests that joined, by row."""


@dataclass(slots=True)
class UnreadLaunch:
    """A launch, or requests that joined without one, of which the host has not read everything."""

    ring: HostRing
    query_len: int
    """Rows per request in its rounds: how their tokens are packed."""
    rows: list[Running | None]
    """As `ReadRound.rows`. Empty without a launch."""
    logprobs: HostCopy | None = None
    """Of the tokens in `ring`; None where the decoder keeps none."""
    joined: Sequence[tuple[Running, int]] = ()
    """Requests that joined after it, and their row then: their token comes from the prompt, and no draft was
    verified."""
    blocks: Sequence[int] = ()
    """KV blocks of requests that left while it may still write them."""


class RoundOutputs:
    """The ring of one decoder, and the first tokens of requests that joined."""

    def __init__(self, platform: Platform, memory: RoundBuffers, num_in_flight: int) -> None:
        """
        Args:
            memory: where rounds leave their results.
            num_in_flight: launches whose rounds may be unread at one time.
        """
        self.memory = memory
        self.num_slots = num_in_flight
        words, requests, device = memory.results.numel(), memory.num_sampled.numel(), platform.device
        size = self.num_slots * (words + 2) + num_in_flight * requests
        mapped = platform.mapped_memory(size, torch.int64)
        written, on_host = (torch.zeros(size, dtype=torch.int64, device=device), None) if mapped is None else mapped
        self._words, self._written = words, written
        self.first_token_ids = written[self.num_slots * (words + 2) :].view(num_in_flight, requests)
        """int64 [launches in flight, R]: the tokens after the prompts of requests that joined, by row."""
        self.ring = written[: self.num_slots * (words + 2)].view(self.num_slots, words + 2)
        """int64 [slots, words + 2]; see `ops.publish_round`."""
        self.progress = torch.zeros(2, dtype=torch.int64, device=device)
        self.again = torch.zeros(1, dtype=torch.int32, device=device)
        """int32 [1]: whether the launch under way has another round."""
        copies = [HostCopy(platform, size, torch.int64, on_host) for _ in range(num_in_flight)]
        self._rings = [self._host_ring(number, copy, memory) for number, copy in enumerate(copies)]
        self._num_read = self._num_sent = 0

    def named_tensors(self) -> dict[str, Tensor]:
        """What the rounds' graphs touch, by name."""
        return {"round.outputs": self._written, "round.progress": self.progress, "round.again": self.again}

    def publish(self, batch: ProposeBatch, remaining: Tensor, stop_token_ids: Tensor) -> None:
        """Write what a round sampled; the last work of every round. See `ops.publish_round`."""
        ops.publish_round(
            self.memory.results, batch.sampled_token_ids, batch.num_sampled, remaining, stop_token_ids, self.ring,
            self.progress, self.again, 1,
        )  # fmt: skip

    def _host_ring(self, number: int, copy: HostCopy, memory: RoundBuffers) -> HostRing:
        words, behind = self._words + 2, memory.sampled_token_ids.shape[0]
        numbers = copy.host.numpy().data
        slots = [numbers[start : start + words] for start in range(0, self.num_slots * words, words)]
        places, requests = self.first_token_ids.shape
        first = numbers[self.num_slots * words :]
        return HostRing(
            number,
            copy,
            [_Slot(slot[:behind], slot[behind:-3].cast("B").cast("i"), slot[-3:]) for slot in slots],
            [first[place * requests : (place + 1) * requests] for place in range(places)],
        )

    def send(self) -> HostRing:
        """Queue, after a launch and the requests that joined after it, what the host will wait for: `HostRing.copy`,
        before `round` and `first_tokens`. It is overwritten from the next launch on."""
        ring = self._rings[self._num_sent % len(self._rings)]
        self._num_sent += 1
        ring.copy.start(self._written)
        return ring

    def place(self, row: int) -> int:
        """Where in `first_token_ids`, flat, a request's token goes that joins before the next `send`."""
        places, requests = self.first_token_ids.shape
        return self._num_sent % places * requests + row

    def first_tokens(self, ring: HostRing) -> list[int]:
        """[R]: the first tokens by row."""
        return ring.first_token_ids[ring.number % self.first_token_ids.shape[0]].tolist()

    def round(self, launch: UnreadLaunch) -> ReadRound:
        """The next round that was not read, of a launch that was waited for.

        Raises:
            SpecgraphError: a later round has overwritten it.
        """
        index, rows, query_len = self._num_read % self.num_slots, launch.rows, launch.query_len
        token_ids, counts, state = launch.ring.slots[index]
        lost, number, again = state.tolist()
        self._num_read += 1
        if number != self._num_read:
            raise SpecgraphError(
                f"slot {index} of the ring holds round {number} where round {self._num_read} was to be read: more "
                "rounds were launched than the ring has slots; a bug of specgraph"
            )
        num_rows = len(rows)
        packed, sampled = token_ids[: num_rows * query_len].tobytes(), counts[:num_rows].tobytes()
        return ReadRound(number, rows, query_len, packed, sampled, not again, lost)


def impossible_count(number: int, row: int, state: Running, count: int, query_len: int) -> str:
    """The message for a round that has 0 tokens, or more than K + 1, for a request that runs on the host."""
    if count:
        cause = "that K is another round's"
    else:
        cause = "the row was another request's in that round, or the device ended the request and the host did not"
    return (
        f"round {number}, read with K {query_len - 1}, has {count} tokens in row {row} for request "
        f"{state.index}, which has {state.num_output} of at most {state.request.max_tokens} tokens: {cause}; a bug of "
        "specgraph"
    )
