"""The running requests, and their rounds as one launch each: the state between rounds stays on the device.

The host writes when a request joins or leaves, and else only launches. What a round sampled is copied to the host
after it; that copy is read one round late, while the next round runs (`EngineConfig.rounds_ahead`). The device looks
for stop tokens and limits itself, so a request that finished is inert in the round that was launched meanwhile.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

import torch

from specgraph.capture import HostCopy, padded_size, write
from specgraph.draft import Drafter
from specgraph.engine.adaptive_k import AdaptiveK, observe_round
from specgraph.engine.blocks import BlockAllocator
from specgraph.engine.joining import prefill_passes
from specgraph.engine.metrics import AcceptanceMetrics
from specgraph.engine.request import Running
from specgraph.engine.round_outputs import ReadRound, UnreadLaunch, impossible_count
from specgraph.engine.round_program import RoundRunner
from specgraph.engine.sampling_requests import write_sampling
from specgraph.engine.steady_rounds import RoundChunks, SteadyRounds
from specgraph.engine.target import TargetRunner
from specgraph.errors import SpecgraphError


class DeviceRounds:
    """The running requests of one decoder, each in a row of the round's memory that it keeps while it can."""

    def __init__(
        self,
        target: TargetRunner,
        drafter: Drafter,
        runner: RoundRunner,
        allocator: BlockAllocator,
        metrics: AcceptanceMetrics,
    ) -> None:
        """allocator: takes back the blocks of requests that leave."""
        self.adaptive: AdaptiveK | None = None
        """Chooses K for each launch; None where the config does."""
        self.target, self.drafter, self.runner = target, drafter, runner
        self.config, self.platform = target.config, target.platform
        self.allocator, self.metrics = allocator, metrics
        self.rows: list[Running | None] = []
        """Who is in which row; as long as the last row in use. Replaced and not written, since launches keep it."""
        self.num_running = 0
        """How many requests run."""
        self.num_rounds = 0
        """Rounds launched so far; further rounds of a launch count when they are read."""
        self.outputs = runner.outputs
        tokens, in_flight = target.round.sampled_token_ids.numel(), runner.rounds_ahead + 1
        self._free_logprobs = [HostCopy(self.platform, tokens, torch.float32) for _ in range(in_flight)]
        self._order = torch.zeros(self.config.max_num_requests, dtype=torch.int64, device=self.platform.device)
        self._unread: deque[UnreadLaunch] = deque()
        self._ready: deque[ReadRound] = deque()
        self._joined: list[tuple[Running, int]] = []
        """Requests that joined since the last launch, and their row."""
        self._left: list[int] = []
        """Rows to make inert before the next launch."""
        self._query_len = self.config.query_len
        """Rows per request in the last round: how its sampled tokens and hidden states are packed."""
        self._most_tokens = max(self.config.query_lens)
        """Of a request in one launch."""
        self._steady = SteadyRounds(metrics)
        self._rounds_ahead, self._host_lengths = runner.rounds_ahead, target.attention.host_parameters
        self._reads_each = self.config.logprobs or self._host_lengths
        """Whether the host reads every request of every round."""

    @property
    def running(self) -> list[Running]:
        """The requests that run, by row."""
        self.fold()
        return [state for state in self.rows if state is not None]

    def fold(self) -> None:
        """Bring `Running.token_ids` and the metrics up to date with all rounds that were handed out."""
        self._steady.fold()

    def step(self, admit: Callable[[], None] | None) -> Sequence[tuple[Running, list[int]]] | RoundChunks:
        """Launch, let requests join, and hand out the oldest round that was not handed out; of a launch with several
        rounds the later ones are handed out by the next calls, which launch nothing.

        Args:
            admit: calls `join` for each request that joins; None where nobody waits.

        Returns:
            Each request with the tokens that it sampled in that round: accepted drafts, then the target's own token; or
            the token after its prompt. Chunks where nobody joined or ended.
        """
        while True:
            if not self._ready:
                self._launch_ahead(admit)
                if not self._unread:
                    return ()
                self._receive()
            sampled = self._hand_out(self._ready.popleft())
            if sampled is not None:
                return sampled

    def join(self, state: Running) -> None:
        """Prefill a request, which has its KV blocks, and let it take part in the next round."""
        row = next((row for row, other in enumerate(self.rows) if other is None), len(self.rows))
        self.rows = [*self.rows[:row], state, *self.rows[row + 1 :]]
        self._joined.append((state, row))
        self.num_running += 1
        state.row = row
        starts = prefill_passes(self.target, self.drafter, state)
        sampling = self.target.verify_program.sampling
        if sampling is not None:
            write_sampling(sampling, [state], row)
        self.runner.join(state, row, state.position - starts[-1], self._query_len)

    def leave(self, state: Running, *, finished: bool) -> None:
        """Take a request out. Its KV blocks are given back once no launched round can write them: at once where it
        finished, because it is inert in every round after that; else when the rounds in flight were read."""
        self._steady.fold()
        self.rows = _without(self.rows, state)
        self.num_running -= 1
        self._left.append(state.row)
        blocks: Sequence[int] = state.blocks
        for unread in self._unread:
            if state in unread.rows:
                unread.rows = _without(unread.rows, state)
                if unread is self._unread[-1] and not finished:
                    unread.blocks, blocks = [*unread.blocks, *blocks], ()
            unread.joined = [joined for joined in unread.joined if joined[0] is not state]
        for read in self._ready:
            read.rows = _without(read.rows, state)
            read.joined = [joined for joined in read.joined if joined[0] is not state]
        self.allocator.free(blocks)
        while self.rows and self.rows[-1] is None:
            self.rows.pop()
        if not self.rows:  # perhaps nobody will step for a long time
            while any(unread.blocks for unread in self._unread):
                self._receive()
            self._ready.clear()

    def _launch_ahead(self, admit: Callable[[], None] | None) -> None:
        """Launch, and let requests join, until as many launches are unread as may be; see `step`."""
        while len(self._unread) <= self._rounds_ahead:
            if self._left:
                self._vacate()
            is_enough = self._steady.left <= len(self._unread) * self._most_tokens and self._all_may_end()
            rows = [] if is_enough else self.rows
            if rows:
                self._launch(len(rows))
            if admit is not None:
                admit()
            if not self.rows or (is_enough and not self._joined):
                break
            self._send(rows)

    def _all_may_end(self) -> bool:
        """Whether every request ends, by its length, in what is in flight if that gives as many tokens as rounds gave
        so far: a further round would then be for nothing, and the host reads first."""
        if not self._unread or not self.rows:
            return False
        self._steady.fold()
        of_a_launch = math.ceil(self.metrics.mean_acceptance_length)
        tokens = sum(of_a_launch if unread.rows else 1 for unread in self._unread)
        return all(state is None or state.limit - len(state.token_ids) <= tokens for state in self.rows)

    def _vacate(self) -> None:
        """Make the rows of requests that left inert, before anybody joins there."""
        for row in self._left:
            self.target.round.num_sampled[row].fill_(0)
        self._left.clear()
        self._compact()

    def _launch(self, num_rows: int) -> None:
        """Launch one round, or several, over the rows in use."""
        k = None if self.adaptive is None else self.adaptive.choose(num_rows)
        ready = self.runner.dispatch(num_rows, self._query_len, k)
        if self._host_lengths:
            running = self.running
            counts = [state.num_sampled for state in running]
            self.runner.launch(ready, [state.position - state.num_sampled for state in running], counts)
        else:
            self.runner.launch(ready)
        self.num_rounds += 1
        self._query_len = ready.batch.num_speculative_tokens + 1

    def _send(self, rows: list[Running | None]) -> None:
        """Queue what the host will read of a launch over `rows`, and of the requests that joined after it."""
        launch = UnreadLaunch(self.outputs.send(), self._query_len, rows)
        if self.config.logprobs:
            values = self.target.verify_program.logprobs(len(self.rows), self._query_len)
            assert values is not None
            launch.logprobs = self._free_logprobs.pop()
            launch.logprobs.start(values)
        if self._joined:
            launch.joined, self._joined = self._joined, []
        self._unread.append(launch)

    def _receive(self) -> None:
        """Wait for the oldest launch that was not read, and read its rounds and the first tokens after it."""
        launch = self._unread.popleft()
        launch.ring.copy.read()
        if launch.blocks:
            self.allocator.free(launch.blocks)
        if launch.rows:
            read = self.outputs.round(launch)
            self._ready.append(read)
            while not read.is_last:
                read = self.outputs.round(launch)
                self._ready.append(read)
                self.num_rounds += 1
        else:
            read = ReadRound(0, [], 1, b"", b"", is_last=True)
            self._ready.append(read)
        if launch.logprobs is not None:
            read.logprobs = launch.logprobs.read().tolist()
            self._free_logprobs.append(launch.logprobs)
        if launch.joined:
            tokens = self.outputs.first_tokens(launch.ring)
            read.joined = [(state, row, tokens[row]) for state, row in launch.joined]

    def _hand_out(self, read: ReadRound) -> Sequence[tuple[Running, list[int]]] | RoundChunks | None:
        """Give each request of a round its tokens; None where it has none for anybody."""
        if not (self._reads_each or read.joined):
            counts = self._steady.take(read)
            if counts is not None:
                if self.adaptive is not None and read.query_len > 1:
                    self.adaptive.rates.observe(read.query_len - 1, [count - 1 for count in counts])
                self.metrics.rows_without_block = read.rows_without_block
                return RoundChunks(read, len(counts))
        self._steady.end()
        tokens, query_len, row = read.tokens(), read.query_len, 0
        sampled: list[tuple[Running, list[int]]] = []
        accepted: list[int] = []
        for state, count in zip(read.rows, read.num_sampled(), strict=True):
            if state is not None:
                if not 0 < count <= query_len:  # with 0, stepping on would never end
                    raise SpecgraphError(impossible_count(read.number, row // query_len, state, count, query_len))
                state.num_sampled = count
                accepted.append(count - 1)
                sampled.append((state, tokens[row : row + count]))
            row += query_len
        if read.logprobs is not None:
            for row, state in enumerate(read.rows):
                if state is not None:
                    state.logprobs = read.logprobs[row][: state.num_sampled]
        if accepted:
            self.metrics.rounds += 1
            self.metrics.rows_without_block = read.rows_without_block
            observe_round(self.metrics, self.adaptive, accepted, query_len - 1)
        for state, row, token in read.joined:
            state.num_sampled = 1
            if read.logprobs is not None:
                state.logprobs = read.logprobs[row][:1]
            sampled.append((state, [token]))
        return sampled or None

    def _compact(self) -> None:
        """Move requests to the first rows where a smaller graph then holds them, or where lengths come from the host,
        which lists them without gaps."""
        if None not in self.rows:
            return
        kept, n, sizes = [state.row for state in self.running], len(self.rows), self.config.sizes
        m = len(kept)
        smaller = padded_size(m, sizes) != padded_size(n, sizes)
        if not (smaller or self.target.attention.host_parameters):
            return
        order = self._order[:m]
        write(order, kept)
        memory, own = self.target.round.sliced(n, self._query_len), self.runner.state
        per_row = [
            memory.sampled_token_ids, memory.num_sampled, memory.start_positions, memory.block_table,
            memory.aux_hidden.view(n, self._query_len, -1), own.remaining, own.stop_token_ids,
        ]  # fmt: skip
        sampling = self.target.verify_program.sampling
        asked = [] if sampling is None else sampling.named_tensors().values()
        for tensor in (*per_row, self.target.round.temperature, self.target.round.seeds, *asked):
            tensor[:m].copy_(tensor[order])
        memory.num_sampled[m:].zero_()
        self.rows = [*self.running]
        for row, state in enumerate(self.running):
            state.row = row


def _without(rows: list[Running | None], state: Running) -> list[Running | None]:
    return [None if other is state else other for other in rows]
