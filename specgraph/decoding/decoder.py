"""Speculative decoding of requests that come and go: prefill who is new, verify, propose, read what came out.

The device work of a round needs nothing that the host learns in that round: the propose reads accepted counts and
hidden states where the verify left them. One transfer brings the new tokens to the host, those after new prompts too;
it is queued before the propose, so that the host has the tokens while the drafter still runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from specgraph.attention import NULL_BLOCK, AttentionBackend, KVCache, PagedAttention
from specgraph.decoding.blocks import BlockAllocator, allocate_caches
from specgraph.decoding.config import EngineConfig
from specgraph.decoding.metrics import AcceptanceMetrics
from specgraph.decoding.request import Chunk, Generation, Request, Running
from specgraph.decoding.target import TargetRunner, sample_token
from specgraph.drafting import Drafter, DraftTokens, ProposeBatch
from specgraph.errors import CapacityError, ConfigError
from specgraph.models.protocol import DraftHead, ParallelHead, Target
from specgraph.platforms import Platform
from specgraph.runner import HostCopy, report_captures, write


class SpeculativeDecoder:
    """Generates for batches of requests with a target and, optionally, a drafter.

    `generate` and `stream` take a list of requests. An engine whose requests come and go uses `add`, `cancel` and
    `step`.

    Without a drafter it is plain decoding; with `query_len` K + 1 and no drafter it decodes one token per round at the
    verify pass's shape, which is what speculative greedy output is compared with bit for bit. Not thread-safe.
    """

    def __init__(
        self,
        target: Target,
        head: DraftHead | ParallelHead | None,
        platform: Platform,
        config: EngineConfig,
        *,
        query_len: int | None = None,
        attention: AttentionBackend | None = None,
    ) -> None:
        """
        Args:
            config: limits and choices, of target and drafter.
            query_len: rows per request in a target pass without a drafter, 1 by default; with one it is K + 1.
            attention: for target and drafter; the core's paged attention with device lengths by default.

        Raises:
            ConfigError: max_model_len is more than the target has positions for.
            UnsupportedError: the lowering that was asked for is not possible on this platform.
        """
        if config.max_model_len > target.max_model_len:
            raise ConfigError(f"max_model_len {config.max_model_len} exceeds the target's {target.max_model_len}")
        self.query_len = query_len if query_len is not None else config.query_len if head is not None else 1
        if self.query_len < 1:
            raise ConfigError(f"query_len must be at least 1, got {query_len}")
        if head is not None and self.query_len != config.query_len:
            raise ConfigError(f"with a drafter query_len is K + 1 = {config.query_len}, got {query_len}")
        self.platform, self.config = platform, config
        largest = config.prefill_rows[-1]
        self.prefill_chunk = min(config.prefill_chunk or largest, largest)
        per_request = -(-config.max_model_len // config.block_size)
        enough = 1 + per_request * config.max_num_requests
        self.allocator = BlockAllocator(enough if config.num_blocks is None else config.num_blocks)
        backend = attention or PagedAttention()
        self.drafter: Drafter | None = None
        if head is not None:
            self.drafter = Drafter(head, self._caches(head), platform, config, attention=backend)
        self.target = TargetRunner(
            target,
            self._caches(target),
            platform,
            config,
            attention=backend,
            query_lens=(self.query_len,) if head is None else config.query_lens,
            drafter=self.drafter,
        )
        self.metrics = AcceptanceMetrics(config.num_speculative_tokens if head is not None else 0)
        self._waiting: deque[Running] = deque()
        self._running: list[Running] = []
        self._ended: list[Chunk] = []
        self._next_id = 0
        self._drafts: DraftTokens | None = None
        self._finished = HostCopy(platform, config.max_num_requests * (self.query_len + 1), torch.int64)
        self._draft_rows = torch.zeros(config.max_num_requests, dtype=torch.int64, device=platform.device)
        self._rows = self.query_len
        """Rows per request in the next verify: one more than were drafted last. Without a drafter always the same."""

    def capture(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Capture all graphs. Call once before generating; nothing is captured at request time.

        Args:
            progress: called after each capture with the number of captures done and their number in all.
        """
        runners = [self.target] if self.drafter is None else [self.target, self.drafter]
        captured = report_captures(runners, progress)
        for runner in runners:
            runner.capture(captured)

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """Generate for all requests, in batches that shrink and grow as requests finish and join."""
        results = [Generation() for _ in requests]
        for chunk in self.stream(requests):
            result = results[chunk.request]
            result.token_ids += chunk.token_ids
            result.finish_reason, result.message = chunk.finish_reason, chunk.message
        return results

    def stream(self, requests: Sequence[Request]) -> Iterator[Chunk]:
        """As `generate`, giving the tokens of each round as they come. `Chunk.request` is the index in `requests`.

        A request that can never fit is refused with a message while the others go on; one that does not fit now waits.

        Raises:
            ConfigError: a request is wrong in itself (see `check`); nothing was run.
            CapacityError: this decoder has unfinished requests, of another stream or from `add`.
        """
        if self.num_unfinished:
            raise CapacityError(
                f"this decoder has {self.num_unfinished} unfinished requests, of a stream that is still open or from "
                "add(): finish, close() or cancel() them first"
            )
        refused: dict[int, str] = {}
        for index, request in enumerate(requests):
            try:
                self.check(request)
            except CapacityError as error:
                refused[index] = str(error)
        order = {self.add(request): i for i, request in enumerate(requests) if i not in refused}
        try:
            yield from (Chunk(index, [], 0, "refused", why) for index, why in refused.items())
            while self.num_unfinished:
                yield from [replace(chunk, request=order[chunk.request]) for chunk in self.step()]
        finally:
            for request_id in order:
                self.cancel(request_id)
            self._ended.clear()

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run, and those whose last chunk was not handed out yet."""
        return len(self._waiting) + len(self._running) + len(self._ended)

    def add(self, request: Request) -> int:
        """Queue a request; it joins the batch in a later `step`, when a row and KV blocks are free.

        Returns:
            The id that names it in chunks and in `cancel`.

        Raises:
            CapacityError, ConfigError: it can never run here; see `check`.
        """
        self.check(request)
        request_id, self._next_id = self._next_id, self._next_id + 1
        self._waiting.append(Running(request_id, request, [], list(request.prompt_token_ids)))
        return request_id

    def cancel(self, request_id: int) -> bool:
        """End a request now and free its KV blocks. The next `step` gives its last chunk, with reason "cancelled".

        Returns:
            Whether it was still unfinished.
        """
        for states in (self._waiting, self._running):
            for state in states:
                if state.index == request_id:
                    states.remove(state)
                    self.allocator.free(state.blocks)
                    self._ended.append(Chunk(request_id, [], 0, "cancelled"))
                    return True
        return False

    def step(self) -> list[Chunk]:
        """One round over the batch, after which new requests may have joined; gives each request's new tokens.

        `Chunk.request` is the id from `add`. An empty list means that there is nothing to do.
        """
        ended, self._ended = self._ended, []
        if not self._waiting and not self._running:
            return ended
        running, drafter, num_drafts = self._running, self.drafter, self._rows - 1
        verified = len(running)
        self._verify(running)
        # After the verify, which also writes hidden states of padded rows: a new request needs its own for the propose.
        self._admit(running)
        batch = self._round(len(running))
        self._finished.start(torch.cat([batch.sampled_token_ids, batch.num_sampled[:, None].long()], dim=1))
        if drafter is not None:
            self._propose(drafter, running, batch)
        chunks: list[Chunk] = []
        rounds: list[list[int]] = self._finished.read().tolist()
        going: list[Running] = []
        for row, (state, (*sampled, count)) in enumerate(zip(running, rounds, strict=True)):
            if drafter is not None and num_drafts and row < verified:
                self.metrics.observe(count - 1)
            state.row = row
            state.token_ids += sampled[:count]
            chunks.append(state.cut(sampled[:count], count - 1, self.config.max_model_len))
            if chunks[-1].finish_reason is None:
                going.append(state)
            else:
                self.allocator.free(state.blocks)
        self._running = going
        return ended + chunks

    def check(self, request: Request) -> None:
        """Refuse what can never run here.

        Raises:
            CapacityError: the prompt or the KV that it may need is too long.
            ConfigError: it wants sampling, and this decoder is greedy; or a token is not in the target's vocabulary.
        """
        vocab = self.target.target.vocab_size
        if not 0 <= min(request.prompt_token_ids) <= max(request.prompt_token_ids) < vocab:
            wrong = next(token for token in request.prompt_token_ids if not 0 <= token < vocab)
            raise ConfigError(f"prompt token {wrong} is not in the target's vocabulary of {vocab}")
        if request.temperature > 0 and not self.config.sampled:
            raise ConfigError(f"temperature {request.temperature} needs a decoder with config.sampled = True")
        length = len(request.prompt_token_ids)
        if length >= self.config.max_model_len:
            raise CapacityError(
                f"the prompt has {length} tokens; with max_model_len {self.config.max_model_len} it may have "
                f"{self.config.max_model_len - 1}"
            )
        needed = self._blocks_needed(request)
        if needed > self.allocator.capacity:
            raise CapacityError(
                f"the request may need {needed} KV blocks of {self.config.block_size} tokens and the cache has "
                f"{self.allocator.capacity}: give the cache more blocks, or ask for fewer tokens"
            )

    def close(self) -> None:
        """Release graphs and their memory."""
        self.target.close()
        if self.drafter is not None:
            self.drafter.close()

    def _caches(self, model: Target | DraftHead | ParallelHead) -> list[KVCache]:
        c = self.config
        blocks = self.allocator.num_blocks
        return allocate_caches(model.attention_layers, blocks, c.block_size, model.dtype, self.platform.device)

    def _blocks_needed(self, request: Request) -> int:
        """All that the request can ever touch, so that it never runs out midway."""
        reach = len(request.prompt_token_ids) + request.max_tokens + 2 * self.query_len
        return -(-min(reach, self.config.max_model_len) // self.config.block_size)

    def _round(self, num_requests: int) -> ProposeBatch:
        """The memory of this round: the target's results, and what the drafter reads."""
        if self.drafter is not None:
            return self.drafter.inputs(num_requests, self._rows)
        return self.target.round.sliced(num_requests, self._rows)

    def _admit(self, running: list[Running]) -> None:
        """Prefill waiting requests, in order, while rows and blocks last, and let them join."""
        before = len(running)
        while self._waiting and len(running) < self.config.max_num_requests:
            needed = self._blocks_needed(self._waiting[0].request)
            if needed > self.allocator.num_free:
                break
            state = self._waiting.popleft()
            state.blocks = self.allocator.allocate(needed)
            running.append(state)
            self._prefill(state, row=len(running) - 1)
        if len(running) > before:
            write(self.target.round.start_positions[before : len(running)], [s.position for s in running[before:]])
            self._write_requests(running, before)

    def _prefill(self, state: Running, row: int) -> None:
        """Target and drafter KV of the prompt, and the first token, as a round that sampled one token."""
        prompt, request = state.token_ids, state.request
        logits = hidden = None
        for start in range(0, len(prompt), self.prefill_chunk):
            chunk = prompt[start : start + self.prefill_chunk]
            logits = self.target.prefill(chunk, start, state.blocks)
            if self.drafter is not None:
                hidden = self.drafter.prefill(prompt, range(start, start + len(chunk)), state.blocks)
        assert logits is not None
        token = sample_token(logits, request.temperature, request.seed, len(prompt))
        self.target.round.sliced(row + 1, self._rows).join(row, token, hidden)

    def _verify(self, running: list[Running]) -> None:
        if not running:
            return
        n, drafts = len(running), self._drafts
        b = self.target.verify_program.sliced(n, self._rows)
        write(b.last_token_ids, [state.token_ids[-1] for state in running])
        moved = [state.row for state in running] != list(range(n))
        if moved:  # a request's block table, temperature and seed stay where they are as long as its row does
            self._write_requests(running, 0)
        if drafts is not None:
            rows = slice(0, n)
            if moved:
                rows = self._draft_rows[:n]
                write(rows, [state.row for state in running])
            b.draft_token_ids.copy_(drafts.token_ids[rows])
            if b.draft_probs is not None and drafts.probs is not None:
                b.draft_probs.copy_(drafts.probs[rows])
        self.target.verify(n, [state.position for state in running], self._rows)
        self.metrics.rounds += 1

    def _propose(self, drafter: Drafter, running: list[Running], batch: ProposeBatch) -> None:
        """Draft for the verified requests, where the verify left them, and for those after them that just joined."""
        starts = [state.position for state in running]
        self._drafts = drafter.propose(batch, host_start_positions=starts, host_num_sampled=self._counts, copy=False)
        self._rows = self._drafts.token_ids.shape[1] + 1

    def _counts(self) -> list[int]:
        return self._finished.read()[:, -1].tolist()

    def _write_requests(self, running: Sequence[Running], first: int) -> None:
        """Upload what belongs to a request and not to a round, for rows `first` on: target and drafter both read it."""
        memory, states, rows = self.target.round, running[first:], slice(first, len(running))
        width = memory.block_table.shape[1]
        write(memory.block_table[rows], [[*s.blocks, *[NULL_BLOCK] * (width - len(s.blocks))] for s in states])
        if self.config.sampled:
            write(memory.temperature[rows], [s.request.temperature for s in states])
            write(memory.seeds[rows], [s.request.seed for s in states])
        elif self.config.synthetic_acceptance is not None:  # requests of one seed must not all accept alike
            write(memory.seeds[rows], [(s.request.seed + s.index) % 2**63 for s in states])
