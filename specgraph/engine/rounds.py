"""The running requests, and their rounds as two passes: verify, then propose.

The device work of a round needs nothing that the host learns in that round: the propose reads accepted counts and
hidden states where the verify left them. One transfer brings the new tokens to the host, those after new prompts too;
it is queued before the propose, so that the host has the tokens while the drafter still runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from specgraph.capture import HostCopy, write
from specgraph.draft import Drafter, DraftTokens, ProposeBatch
from specgraph.engine.adaptive_k import AdaptiveK, observe_round
from specgraph.engine.agreement import RoundPasses
from specgraph.engine.blocks import BlockAllocator
from specgraph.engine.joining import chunk_rows, prefill_request, write_requests
from specgraph.engine.metrics import AcceptanceMetrics
from specgraph.engine.request import Running
from specgraph.engine.sampling_requests import write_sampling
from specgraph.engine.target import TargetRunner
from specgraph.engine.tree_verify import TreeVerifyBuffers


class Rounds:
    """The running requests of one decoder, in rows 0.. of the round's memory, and what runs over them."""

    def __init__(
        self,
        target: TargetRunner,
        drafter: Drafter | None,
        allocator: BlockAllocator,
        metrics: AcceptanceMetrics,
        query_len: int,
    ) -> None:
        """
        Args:
            allocator: takes back the blocks of requests that leave.
            query_len: rows per request in the first verify.
        """
        self.adaptive: AdaptiveK | None = None
        """Chooses K for each propose; None where the config does."""
        self.target, self.drafter, self.config, self.platform = target, drafter, target.config, target.platform
        self.allocator, self.metrics = allocator, metrics
        self.running: list[Running] = []
        self._drafts: DraftTokens | None = None
        requests = self.config.max_num_requests
        self._finished = HostCopy(self.platform, target.round.results.numel(), torch.int64)
        self._logprobs = HostCopy(self.platform, self.target.round.sampled_token_ids.numel(), torch.float32)
        self.draft_rows = torch.zeros(requests, dtype=torch.int64, device=self.platform.device)
        """int64 [R]: written where requests changed their rows, to gather their drafts."""
        self._query_len = query_len
        """Rows per request in the next verify: one more than were drafted last. Without a drafter always the same."""
        self._agreed, self._prefills = RoundPasses(), 0
        """What all ranks run in this round; nothing where they share no collectives. And prefill passes so far."""

    @property
    def num_running(self) -> int:
        """How many requests run."""
        return len(self.running)

    def step(
        self, admit: Callable[[], None] | None, agreed: RoundPasses | None = None
    ) -> list[tuple[Running, list[int]]]:
        """One round over the running requests.

        Args:
            admit: calls `join` for each request that joins; called when the verify is launched. None where nobody
                waits.
            agreed: the passes that all ranks run in this round, where they share collectives.

        Returns:
            Each request with the tokens that its verify, or its prompt's prefill, sampled: accepted drafts, then the
            target's own token.
        """
        num_drafts, verified, running = self._query_len - 1, len(self.running), self.running
        self._agreed, self._prefills = agreed or RoundPasses(), 0
        self.verify(running)
        # After the verify, which also writes hidden states of padded rows: a new request needs its own for the propose.
        if admit is not None:
            admit()
        if len(running) > verified:
            joined = running[verified:]
            write(self.target.round.start_positions[verified : len(running)], [state.position for state in joined])
            self.write_requests(running, verified)
        self._prefill_idle()
        if not running:
            if self.drafter is not None and self._agreed.proposed:
                self._drafts = self.drafter.propose_idle(self._agreed.proposed, self._query_len)
                self._query_len = self._drafts.query_len
            return []
        batch = self._round(len(running))
        self._finished.start(self.target.round.results)
        logprobs = self.target.verify_program.logprobs(len(running), num_drafts + 1)
        if logprobs is not None:
            self._logprobs.start(logprobs)
        if self.drafter is not None:
            self.propose(self.drafter, running, batch)
        sampled: list[tuple[Running, list[int]]] = []
        results = self._finished.read()
        tokens, counts = self.target.round.unpacked(results, len(running), num_drafts + 1)
        self.metrics.rows_without_block = int(results[-1])
        if self.drafter is not None and verified:
            accepted = [count - 1 for count in counts[:verified]]
            observe_round(self.metrics, self.adaptive, accepted, num_drafts)
        for row, (state, count) in enumerate(zip(running, counts, strict=True)):
            state.row, state.num_sampled = row, count
            if logprobs is not None:
                state.logprobs = self._logprobs.read()[row, :count].tolist()
            sampled.append((state, tokens[row][:count]))
        return sampled

    def join(self, state: Running) -> None:
        """Prefill a request, which has its KV blocks, and let it take part in the next propose."""
        self.running.append(state)
        self.prefill(state, row=len(self.running) - 1)

    def leave(self, state: Running, *, finished: bool) -> None:
        """Take a request out, finished or cancelled, and give its KV blocks back: later work in the stream may write
        them."""
        self.running.remove(state)
        self.allocator.free(state.blocks)

    def prefill(self, state: Running, row: int) -> None:
        """Target and drafter KV of the prompt, and the first token, as a round that sampled one token."""
        memory = self.target.round.sliced(row + 1, self._query_len)
        at_least = self._agreed.prefill_rows
        self._prefills += prefill_request(self.target, self.drafter, state, memory, row, at_least)

    def _prefill_idle(self) -> None:
        """The prefill passes that other ranks run in this round and this one has no prompt for."""
        rows = self._agreed.prefill_rows
        for _ in range(self._prefills, self._agreed.prefills):
            self.target.prefill((), 0, (), at_least=rows)
            if self.drafter is not None:
                self.drafter.prefill((), range(0), (), at_least=rows)

    def verify(self, running: Sequence[Running]) -> None:
        """Upload each request's last token and position, and run the target over them and their drafts."""
        n, drafts = len(running), self._drafts
        trees = drafts is not None and drafts.parents is not None
        program = next(
            (each for each in self.target.verify_programs if each.of_trees == trees), self.target.verify_program
        )
        if not running:
            if self._agreed.verified:
                self.target.verify(0, [], self._query_len, program, self._agreed.verified)
                self.metrics.rounds += 1
            return
        b = program.sliced(n, self._query_len)
        write(b.last_token_ids, [state.token_ids[-1] for state in running])
        moved = [state.row for state in running] != list(range(n))
        if moved:  # a request's block table, temperature and seed stay where they are as long as its row does
            self.write_requests(running, 0)
            if self.target.verify_program.sampling is not None:
                write_sampling(self.target.verify_program.sampling, running, 0)
        if drafts is not None:
            rows = slice(0, n)
            if moved:
                rows = self.draft_rows[:n]
                write(rows, [state.row for state in running])
            b.draft_token_ids.copy_(drafts.token_ids[rows])
            if isinstance(b, TreeVerifyBuffers) and drafts.parents is not None:
                b.draft_parents.copy_(drafts.parents[rows])
            if b.draft_probs is not None and drafts.probs is not None:
                b.draft_probs.copy_(drafts.probs[rows])
        self.target.verify(n, [state.position for state in running], self._query_len, program, self._agreed.verified)
        self.metrics.rounds += 1

    def propose(self, drafter: Drafter, running: Sequence[Running], batch: ProposeBatch) -> None:
        """Draft for the verified requests, where the verify left them, and for those after them that just joined."""
        starts = [state.position for state in running]
        k = None
        if self.adaptive is not None:
            k = self.adaptive.choose(len(running))
        self._drafts = drafter.propose(
            batch,
            host_start_positions=starts,
            host_num_sampled=self._counts,
            copy=False,
            num_speculative_tokens=k,
        )
        self._query_len = self._drafts.query_len

    def write_requests(self, running: Sequence[Running], first: int) -> None:
        """See `joining.write_requests`."""
        write_requests(self.target.round, self.config, running[first:], first)

    def _round(self, num_requests: int) -> ProposeBatch:
        """The memory of this round: the target's results, and what the drafter reads."""
        if self.drafter is not None:
            return self.drafter.inputs(num_requests, self._query_len, self._agreed.proposed)
        return self.target.round.sliced(num_requests, self._query_len)

    def passes(self, joining: Sequence[Running], num_waiting: int) -> RoundPasses:
        """What the next round has to run for the requests here.

        Args:
            joining: requests that will join in it, of the `num_waiting` that wait.
        """
        running, prompts = len(self.running), [len(state.token_ids) for state in joining]
        longest = chunk_rows(self.config)
        return RoundPasses(
            query_len=self._query_len,
            verified=running,
            proposed=running + len(joining),
            prefills=sum(-(-length // longest) for length in prompts),
            prefill_rows=min(longest, max(prompts, default=0)),
            unfinished=running + num_waiting,
        )

    @property
    def num_rounds(self) -> int:
        """Rounds launched so far."""
        return self.metrics.rounds

    def _counts(self) -> list[int]:
        memory, n = self.target.round, len(self.running)
        return memory.unpacked(self._finished.read(), n, self._query_len)[1]
