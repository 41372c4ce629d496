"""The running requests and the loop over their rounds. Between two rounds a request's state is on the device.

The host writes a row when a request joins or leaves, and otherwise only launches. The results of a round are copied to
the host right after it. The host reads them while the next round runs, or before it launches one (`Rounds.ahead`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from specgraph.capture import HostCopy, padded_size, write
from specgraph.errors import SpecgraphError
from specgraph_run.decoder.adaptive_k import AdaptiveK
from specgraph_run.decoder.agreement import RoundPasses
from specgraph_run.decoder.blocks import BlockAllocator
from specgraph_run.decoder.joining import join_round
from specgraph_run.decoder.metrics import AcceptanceMetrics
from specgraph_run.decoder.request import Running
from specgraph_run.decoder.round_stages import HostState, RoundStages
from specgraph_run.decoder.states import free_slot
from specgraph_run.decoder.verify_buffers import logprobs_of


@dataclass(frozen=True, slots=True)
class _HostMemory:
    """The host memory that the results of one round are copied to."""

    results: HostCopy
    logprobs: HostCopy


@dataclass(slots=True)
class _UnreadRound:
    """A round that the host has not read, with the requests that joined behind it."""

    copied: _HostMemory
    query_len: int
    """Rows per request. The round's tokens are packed by it."""
    rows: list[Running | None]
    """The request of each row at the launch. None if the row was free or its request has left. Empty if requests joined
    without a round before them."""
    joined: list[tuple[Running, int]] = field(default_factory=list[tuple[Running, int]])
    """Requests that joined behind the round, with their rows. Their first token comes from the prompt's prefill."""

    def forget(self, state: Running) -> None:
        """Drop the results of a request that left."""
        self.rows = [None if other is state else other for other in self.rows]
        self.joined = [joined for joined in self.joined if joined[0] is not state]


class Rounds:
    """The running requests of one decoder. Each has a row of the shared buffers, and moves only in `_compact`."""

    def __init__(self, stages: RoundStages, allocator: BlockAllocator, metrics: AcceptanceMetrics, ahead: int) -> None:
        """
        Args:
            allocator: takes back the blocks of requests that leave.
            ahead: rounds to launch before the last one's results are read, 0 or 1.
        """
        self.adaptive: AdaptiveK | None = None
        """The choice of K for each launch. None if the config gives K."""
        self.stages, self.target, self.drafter, self.config = (
            stages,
            stages.target,
            stages.drafter,
            stages.target.config,
        )
        self.allocator, self.metrics, self.ahead = allocator, metrics, ahead
        self.rows: list[Running | None] = []
        """The request of each row, up to the last row in use. A change makes a new list: unread rounds keep the old."""
        self.num_rounds = 0
        """Rounds launched so far."""
        self._query_len = stages.query_len
        """Rows per request in the last round. Its sampled tokens and hidden states are packed by it."""
        platform, memory = self.target.platform, self.target.shared
        self._copies = [
            _HostMemory(
                HostCopy(platform, memory.results.numel(), torch.int64),
                HostCopy(platform, memory.sampled_token_ids.numel(), torch.float32),
            )
            for _ in range(ahead + 1)
        ]
        self._order = torch.zeros(self.config.max_num_requests, dtype=torch.int64, device=platform.device)
        self._unread: deque[_UnreadRound] = deque()
        self._joined: list[tuple[Running, int]] = []
        """Requests that joined since the last launch, with their rows."""
        self._left: list[int] = []
        """Rows to make inert before the next launch."""
        self._agreed, self._passes = RoundPasses(), 0
        """The passes that all ranks run in this round (no pass without data parallel ranks), and the number of prefill
        passes that were run in it so far, the target's and the drafter's in turns."""

    @property
    def running(self) -> list[Running]:
        """The requests that run, by row."""
        return [state for state in self.rows if state is not None]

    def step(self, admit: Callable[[], None], agreed: RoundPasses | None = None) -> list[tuple[Running, list[int]]]:
        """Launch rounds, let requests join, and read the oldest unread round.

        Args:
            admit: called behind each launch. It calls `join` for each request that joins, and `leave` if that fails.
            agreed: the passes that all ranks run in this round. None if ranks share no collectives.

        Returns:
            Each request with the tokens that it sampled in that round: accepted drafts, then the target's own token. A
            request that joined has the token after its prompt.
        """
        self._agreed = agreed or RoundPasses()
        while True:
            self._launch_ahead(admit)
            if not self._unread:
                return []
            sampled = self._read(self._unread[0])
            self._unread.popleft()
            if sampled:
                return sampled

    def join(self, state: Running) -> None:
        """Prefill a request that has its KV blocks, and let it take part in the next round."""
        state.row = row = next((row for row, other in enumerate(self.rows) if other is None), len(self.rows))
        if (states := self.target.states) is not None:
            state.slot = free_slot(other.slot for other in self.running)
            states.take(state.blocks[0], state.slot)
        self.rows = [*self.rows[:row], state, *self.rows[row + 1 :]]
        join_round(self.target, self.drafter, state, self._query_len, self._agreed.prefill_rows, self._passed)
        self._joined.append((state, row))

    def leave(self, state: Running) -> None:
        """Take a request out and give its KV blocks back. A round in flight may still write to the blocks, but their
        next owner's work is launched after it."""
        self._left += [row for row, other in enumerate(self.rows) if other is state]
        self.rows = [None if other is state else other for other in self.rows]
        self.allocator.free(state.blocks)
        self._joined = [joined for joined in self._joined if joined[0] is not state]
        for unread in self._unread:
            unread.forget(state)
        while self.rows and self.rows[-1] is None:
            self.rows.pop()
        if not self.rows:
            self._unread.clear()

    def reset(self) -> None:
        """Take all requests out at any point of a step. No row is live at the next launch, and no launched round is
        read. KV blocks are not given back here: see `BlockAllocator.reset`."""
        self._left = [*range(self.config.max_num_requests)]
        self._unread.clear()
        self._joined = []
        self.rows = []

    def passes(self, joining: Sequence[Running], num_waiting: int) -> RoundPasses:
        """Return the passes that this rank needs in the next round, with the `joining` among `num_waiting` requests."""
        self._vacate()
        prompts, longest = [len(state.token_ids) for state in joining], self.config.prefill_rows[-1]
        return RoundPasses(
            query_len=self._query_len,
            num_requests=len(self.rows),
            prefills=sum(-(-length // longest) for length in prompts),
            prefill_rows=min(longest, max(prompts, default=0)),
            unfinished=len(self.running) + num_waiting,
        )

    def _launch_ahead(self, admit: Callable[[], None]) -> None:
        """Launch rounds, and let requests join, until `ahead` + 1 rounds are unread."""
        while len(self._unread) <= self.ahead:
            self._vacate()
            rows = [] if self._all_may_end() else self.rows
            if rows or self._agreed.num_requests:
                self._launch(len(rows))
            self._passes = 0
            admit()
            self._prefill_idle()
            if not rows and not self._joined:
                break
            self._copy_results(rows)

    def _all_may_end(self) -> bool:
        """Return True if the rounds in flight are likely to bring every request to its length limit: each round is
        assumed to give the mean number of tokens so far. One more round would be in vain, so the host reads first."""
        if not self._unread or not self.rows:
            return False
        of_a_round = math.ceil(self.metrics.mean_acceptance_length)
        tokens = sum(of_a_round if unread.rows else 1 for unread in self._unread)
        return all(state is None or state.num_left <= tokens for state in self.rows)

    def _launch(self, num_rows: int) -> None:
        """Launch one round over the first `num_rows` rows. The rest of the padded batch is inert."""
        k = None if self.adaptive is None else self.adaptive.choose(num_rows)
        ready = self.stages.find(max(num_rows, self._agreed.num_requests), self._query_len, k)
        host = None
        if self.target.attention.host_parameters:
            counts = [state.num_sampled for state in self.running]
            host = HostState([state.position - state.num_sampled for state in self.running], counts)
        for stage in ready.stages:
            stage(host)
        self.num_rounds += 1
        self._query_len = ready.query_len

    def _passed(self) -> None:
        self._passes += 1

    def _prefill_idle(self) -> None:
        """Run the agreed prefill passes that are left over, without a prompt: this rank has fewer prompts than others,
        or a request failed to join before its passes ran."""
        rows, models = self._agreed.prefill_rows, 1 if self.drafter is None else 2
        for number in range(self._passes, self._agreed.prefills * models):
            if number % models == 0:
                self.target.prefill((), 0, (), at_least=rows)
            elif self.drafter is not None:
                self.drafter.prefill((), range(0), (), at_least=rows)

    def _copy_results(self, rows: list[Running | None]) -> None:
        """Queue the copy of the results of a launch over `rows`, and of the requests that joined behind it."""
        unread = [each.copied for each in self._unread]
        copied = next(each for each in self._copies if all(each is not other for other in unread))
        logprobs = logprobs_of(self.target.shared, len(self.rows), self._query_len)
        self._unread.append(_UnreadRound(copied, self._query_len, rows, self._joined))
        self._joined = []
        copied.results.start(self.target.shared.results)
        if logprobs is not None:
            copied.logprobs.start(logprobs)

    def _read(self, unread: _UnreadRound) -> list[tuple[Running, list[int]]]:
        """Wait for a round, and return each request with its tokens."""
        results, query_len = unread.copied.results.read(), unread.query_len
        verified = [(state, row) for row, state in enumerate(unread.rows) if state is not None]
        num_rows = max([len(unread.rows), *(row + 1 for _, row in unread.joined)])
        rows = num_rows * query_len  # the parts of `SharedBuffers.results`: sampled tokens, then num_sampled
        tokens: list[list[int]] = results[:rows].view(num_rows, query_len).tolist()
        sampled_end = self.target.shared.sampled_token_ids.shape[0]
        counts: list[int] = results[sampled_end:].view(torch.int32)[:num_rows].tolist()
        logprobs = unread.copied.logprobs.read().tolist() if self.target.options.logprobs else None
        self.metrics.rows_without_block = int(results[-1])
        sampled: list[tuple[Running, list[int]]] = []
        for state, row in (*verified, *unread.joined):
            count = counts[row]
            if not 0 < count <= query_len:  # with 0 tokens per round a request would never end
                raise SpecgraphError(
                    f"a round with K {query_len - 1} has {count} tokens in row {row} for request {state.index}: it "
                    "takes 1 to K + 1; the row was another request's, or K another round's; a bug of specgraph"
                )
            state.num_sampled = count
            if logprobs is not None:
                state.logprobs = logprobs[row][:count]
            sampled.append((state, tokens[row][:count]))
        if verified:
            self._count(unread, [counts[row] - 1 for _, row in verified])
        return sampled

    def _count(self, unread: _UnreadRound, accepted: list[int]) -> None:
        """Count a round for the metrics and the choice of K; `accepted` has the accepted drafts of each request."""
        self.metrics.rounds += 1
        if self.drafter is None or unread.query_len == 1:  # a propose of K 0 has no drafts
            return
        self.metrics.observe(accepted, unread.query_len - 1)
        if self.adaptive is not None:
            self.adaptive.acceptance.observe(unread.query_len - 1, accepted)

    def _vacate(self) -> None:
        """Make the rows of requests that left inert, before other requests take them."""
        for row in self._left:
            self.target.shared.num_sampled[row].fill_(0)
        if self._left:
            self._left.clear()
            self._compact()

    def _compact(self) -> None:
        """Close the gaps between rows if a smaller captured size then suffices. With host lengths always close them:
        the host lists lengths without gaps."""
        kept, sizes = self.running, self.config.sizes
        m, n = len(kept), len(self.rows)
        smaller = (padded_size(m, sizes) or m) != (padded_size(n, sizes) or n)
        if m == n or not (smaller or self.target.attention.host_parameters):
            return
        order = self._order[:m]
        write(order, [state.row for state in kept])
        memory = self.target.shared.views(n, rows=self._query_len)
        for tensor in memory.by_request(n):
            tensor[:m].copy_(tensor[order])
        memory.num_sampled[m:].zero_()
        self.rows = [*kept]
        for row, state in enumerate(kept):
            state.row = row
