"""The running requests, and their rounds as one launch each: the state between rounds stays on the device.

The host writes when a request joins or leaves, and else only launches. What a round sampled is copied to the host
after it; that copy is read one round late, while the next round runs (`EngineConfig.rounds_ahead`). The device looks
for stop tokens and limits itself, so a request that finished is inert in the round that was launched meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from specgraph.attention import NULL_BLOCK
from specgraph.decoding.blocks import BlockAllocator
from specgraph.decoding.metrics import AcceptanceMetrics
from specgraph.decoding.request import Running
from specgraph.decoding.round_program import MAX_STOP_TOKENS, RoundRunner
from specgraph.decoding.rounds import prefill_request
from specgraph.decoding.target import TargetRunner
from specgraph.drafting import Drafter
from specgraph.errors import SpecgraphError
from specgraph.graphs import padded_size
from specgraph.runner import HostCopy, write


@dataclass(slots=True)
class _Unread:
    """A round that was launched, and whose tokens the host has not read."""

    copy: HostCopy
    logprobs: HostCopy
    """Of the tokens in `copy`; never started where the decoder keeps none."""
    query_len: int
    """Rows per request in it: how the tokens in the copy are packed."""
    rows: list[Running | None]
    """Who was in which row then; None where nobody was, or who has left since."""
    joined: set[int]
    """Rows of requests that joined after it: their token comes from the prompt, and no draft was verified."""
    blocks: list[int] = field(default_factory=list[int])
    """KV blocks of requests that left while it may still write them."""


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
        self.target, self.drafter, self.runner = target, drafter, runner
        self.config, self.platform = target.config, target.platform
        self.allocator, self.metrics = allocator, metrics
        self.rows: list[Running | None] = []
        """Who is in which row; as long as the last row in use."""
        self.num_rounds = 0
        """Rounds launched so far."""
        self.ahead = 0 if target.attention.host_parameters else self.config.rounds_ahead
        memory, requests = target.round.results, self.config.max_num_requests
        self._free = [HostCopy(self.platform, memory.numel(), torch.int64) for _ in range(self.ahead + 1)]
        tokens = target.round.sampled_token_ids.numel()
        self._free_logprobs = [HostCopy(self.platform, tokens, torch.float32) for _ in range(self.ahead + 1)]
        self._order = torch.zeros(requests, dtype=torch.int64, device=self.platform.device)
        self._unread: deque[_Unread] = deque()
        self._joined: set[int] = set()
        self._left: list[int] = []
        """Rows to make inert before the next launch."""
        self._query_len = self.config.query_len
        """Rows per request in the last round: how its sampled tokens and hidden states are packed."""

    @property
    def running(self) -> list[Running]:
        """The requests that run, by row."""
        return [state for state in self.rows if state is not None]

    def step(self, admit: Callable[[], None]) -> list[tuple[Running, list[int]]]:
        """Launch a round, let requests join, and read the oldest round that was not read.

        Args:
            admit: calls `join` for each request that joins.

        Returns:
            Each request with the tokens that it sampled in the round that was read: accepted drafts, then the target's
            own token; or the token after its prompt.
        """
        sampled: list[tuple[Running, list[int]]] = []
        while not sampled:
            while len(self._unread) <= self.ahead:
                self._launch()
                admit()
                if not self.rows:
                    break
                self._copy()
            if not self._unread:
                break
            sampled = self._read(self._unread.popleft())
        return sampled

    def join(self, state: Running) -> None:
        """Prefill a request, which has its KV blocks, and let it take part in the next round."""
        row = next((row for row, other in enumerate(self.rows) if other is None), len(self.rows))
        self.rows[row : row + 1] = [state]
        self._joined.add(row)
        state.row = row
        prefill_request(self.target, self.drafter, state, self.target.round.sliced(row + 1, self._query_len), row)
        memory, request, at = self.target.round, state.request, slice(row, row + 1)
        width, own = memory.block_table.shape[1], self.runner.program.state
        stops = request.stop_token_ids
        write(memory.start_positions[at], [state.position])
        write(memory.block_table[at], [[*state.blocks, *[NULL_BLOCK] * (width - len(state.blocks))]])
        write(own.remaining[at], [state.room(self.config.max_model_len)])
        write(own.stop_token_ids[at], [[*stops, *[-1] * (MAX_STOP_TOKENS - len(stops))]])
        if self.config.sampled:
            write(memory.temperature[at], [request.temperature])
            write(memory.seeds[at], [request.seed])
        elif self.config.synthetic_acceptance is not None:  # requests of one seed must not all accept alike
            write(memory.seeds[at], [(request.seed + state.index) % 2**63])

    def leave(self, state: Running, *, finished: bool) -> None:
        """Take a request out. Its KV blocks are given back once no launched round can write them: at once where it
        finished, because it is inert in every round after that; else when the rounds in flight were read."""
        self.rows[state.row] = None
        self._joined.discard(state.row)
        self._left.append(state.row)
        blocks = state.blocks
        for unread in self._unread:
            if state in unread.rows:
                unread.rows[unread.rows.index(state)] = None
                if unread is self._unread[-1] and not finished:
                    unread.blocks += blocks
                    blocks = []
        self.allocator.free(blocks)
        while self.rows and self.rows[-1] is None:
            self.rows.pop()
        if not self.rows:  # nobody will step: what is unread holds no tokens, and perhaps blocks to wait for
            for unread in self._unread:
                self._free.append(unread.copy)
                self._free_logprobs.append(unread.logprobs)
                if unread.blocks:
                    unread.copy.read()
                    self.allocator.free(unread.blocks)
            self._unread.clear()

    def _launch(self) -> None:
        """Launch a round over the rows in use, if there are any."""
        for row in self._left:
            self.target.round.num_sampled[row].fill_(0)
        self._left.clear()
        self._compact()
        if not self.rows:
            return
        found = self.runner.dispatch(len(self.rows), self._query_len)
        counts = [state.num_sampled for state in self.running]
        self.runner.launch(found, [state.position - state.num_sampled for state in self.running], counts)
        self.num_rounds += 1
        self._query_len = found.descriptor.num_speculative_tokens + 1

    def _copy(self) -> None:
        """Queue the copy of what the rows sampled."""
        copy, logprobs = self._free.pop(), self._free_logprobs.pop()
        copy.start(self.target.round.results)
        values = self.target.verify_program.logprobs(len(self.rows), self._query_len)
        if values is not None:
            logprobs.start(values)
        self._unread.append(_Unread(copy, logprobs, self._query_len, list(self.rows), self._joined))
        self._joined = set()

    def _read(self, unread: _Unread) -> list[tuple[Running, list[int]]]:
        """Wait for a round's copy, and give each request its tokens."""
        results = unread.copy.read()
        tokens, counts = self.target.round.unpacked(results, len(unread.rows), unread.query_len)
        logprobs = unread.logprobs.read() if self.config.logprobs else None
        self._free.append(unread.copy)
        self._free_logprobs.append(unread.logprobs)
        self.allocator.free(unread.blocks)
        sampled: list[tuple[Running, list[int]]] = []
        for row, state in enumerate(unread.rows):
            if state is not None:
                if not counts[row]:  # stepping on would never end
                    raise SpecgraphError(
                        f"request {state.index} is finished on the device and runs on the host: a bug of specgraph"
                    )
                state.num_sampled = counts[row]
                if logprobs is not None:
                    state.logprobs = logprobs[row, : counts[row]].tolist()
                if unread.query_len > 1 and row not in unread.joined:
                    self.metrics.observe(state.num_sampled - 1)
                sampled.append((state, tokens[row][: state.num_sampled]))
        self.metrics.rounds += len(sampled) > len(unread.joined)
        return sampled

    def _compact(self) -> None:
        """Move requests to the first rows where a smaller graph then holds them, or where lengths come from the host,
        which lists them without gaps."""
        kept, n, sizes = [state.row for state in self.running], len(self.rows), self.config.sizes
        m = len(kept)
        smaller = padded_size(m, sizes) != padded_size(n, sizes)
        if m == n or not (smaller or self.target.attention.host_parameters):
            return
        order = self._order[:m]
        write(order, kept)
        memory, own = self.target.round.sliced(n, self._query_len), self.runner.program.state
        per_row = [
            memory.sampled_token_ids, memory.num_sampled, memory.start_positions, memory.block_table,
            memory.aux_hidden.view(n, self._query_len, -1), own.remaining, own.stop_token_ids,
        ]  # fmt: skip
        sampling = self.target.verify_program.sampling
        asked = [] if sampling is None else sampling.named_tensors().values()
        for tensor in (*per_row, self.target.round.temperature, self.target.round.seeds, *asked):
            tensor[:m].copy_(tensor[order])
        memory.num_sampled[m:].zero_()
        self.rows = list(self.running)
        for row, state in enumerate(self.running):
            state.row = row
