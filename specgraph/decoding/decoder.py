"""The round: prefill who is new, verify, propose, read what came out. One user of `drafting/`.

A round's device work needs nothing that the host learns in that round: the propose reads accepted counts and hidden
states where the verify left them. One transfer brings the finished tokens to the host, those of prompts that join too;
it is queued before the propose, so that tokens are there while the drafter still runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from specgraph.attention import NULL_BLOCK, AttentionBackend, KVCache, PagedAttention
from specgraph.decoding.blocks import BlockAllocator, allocate_caches
from specgraph.decoding.metrics import AcceptanceMetrics
from specgraph.decoding.request import Chunk, Generation, Request, Running
from specgraph.decoding.sampling import sample_token
from specgraph.decoding.target_runner import TargetRunner
from specgraph.decoding.verify_buffers import VerifyOutputs
from specgraph.drafting import DraftConfig, Drafter
from specgraph.drafting.transfers import HostCopy, write
from specgraph.errors import CapacityError, ConfigError
from specgraph.models.protocol import DraftHead, ParallelHead, Target
from specgraph.platforms import Platform


class SpeculativeDecoder:
    """Generates for batches of requests with a target and, optionally, a drafter.

    Without a drafter it is plain decoding; with `query_len` K + 1 and no drafter it decodes one token a round at the
    verify pass's shape, which is what speculative greedy output is compared with bit for bit.
    """

    def __init__(
        self,
        target: Target,
        head: DraftHead | ParallelHead | None,
        platform: Platform,
        config: DraftConfig,
        *,
        num_blocks: int | None = None,
        query_len: int | None = None,
        attention: AttentionBackend | None = None,
        prefill_chunk: int | None = None,
    ) -> None:
        """
        Args:
            config: limits and choices, for the target's graphs too.
            num_blocks: KV blocks, shared by target and drafter block tables; enough for every request by default.
            query_len: rows a request in a target pass without a drafter, 1 by default; with one it is K + 1.
            attention: for target and drafter; the core's paged attention by default.
            prefill_chunk: prompt tokens a prefill pass, at most; the config's largest prompt size by default.

        Raises:
            ConfigError: max_model_len is more than the target has positions for.
            UnsupportedError: the asked lowering is not possible on this platform.
        """
        if config.max_model_len > target.max_model_len:
            raise ConfigError(f"max_model_len {config.max_model_len} exceeds the target's {target.max_model_len}")
        if prefill_chunk is not None and prefill_chunk < 1:
            raise ConfigError(f"prefill_chunk must be at least 1, got {prefill_chunk}")
        self.platform, self.config = platform, config
        self.prefill_chunk = min(prefill_chunk or config.prompt_sizes[-1], config.prompt_sizes[-1])
        per_request = -(-config.max_model_len // config.block_size)
        self.allocator = BlockAllocator(1 + per_request * config.max_num_requests if num_blocks is None else num_blocks)
        backend = attention or PagedAttention()
        self.drafter: Drafter | None = None
        outputs, prompt_aux, aux_layers, draft_vocab, vocab_map = None, None, (), None, None
        if head is not None:
            caches = self._caches(head)
            self.drafter = Drafter(head, caches, platform, config, attention=backend)
            b, prompt_aux = self.drafter.buffers, self.drafter.prompts.buffers.aux_hidden
            outputs = VerifyOutputs(b.sampled_token_ids, b.num_sampled, b.aux_hidden)
            aux_layers, draft_vocab, vocab_map = head.aux_layers, head.draft_vocab_size, head.draft_to_target
        self.query_len = query_len if query_len is not None else config.query_len if head is not None else 1
        if self.query_len < 1:
            raise ConfigError(f"query_len must be at least 1, got {query_len}")
        if head is not None and self.query_len != config.query_len:
            raise ConfigError(f"with a drafter query_len is K + 1 = {config.query_len}, got {query_len}")
        self.target = TargetRunner(
            target,
            self._caches(target),
            platform,
            config,
            query_lens=(self.query_len,) if head is None else config.query_lens,
            aux_layers=aux_layers,
            outputs=outputs,
            prompt_aux=prompt_aux,
            draft_vocab_size=draft_vocab,
            draft_to_target=vocab_map,
            attention=backend,
        )
        self.metrics = AcceptanceMetrics(config.num_speculative_tokens if head is not None else 0)
        self._is_streaming = False
        rows = self.target.query_lens[-1]
        self._finished = HostCopy(platform, config.max_num_requests * (rows + 1), torch.int64)
        self._draft_rows = torch.zeros(config.max_num_requests, dtype=torch.int64, device=platform.device)
        self._rows = self.query_len
        """Rows a request in the next verify: one more than were drafted last. Without a drafter always the same."""

    def capture(self) -> None:
        """Capture all graphs. Call once before generating; never happens at request time."""
        self.target.capture()
        if self.drafter is not None:
            self.drafter.capture()

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """Generate for all requests, in batches that shrink and grow as requests finish and join."""
        results = [Generation() for _ in requests]
        for chunk in self.stream(requests):
            result = results[chunk.request]
            result.token_ids += chunk.token_ids
            result.finish_reason, result.message = chunk.finish_reason, chunk.message
        return results

    def stream(self, requests: Sequence[Request]) -> Iterator[Chunk]:
        """As `generate`, giving each round's tokens as they come.

        A request that can never fit is refused with a message while the others go on; one that doesn't fit now waits.

        Raises:
            ConfigError: a request is wrong in itself (see `check`); nothing was run.
            CapacityError: another stream of this decoder is still open.
        """
        if self._is_streaming:
            raise CapacityError("another stream of this decoder is still open: exhaust it or close() it first")
        waiting: deque[tuple[int, Request]] = deque()
        refused: list[Chunk] = []
        for index, request in enumerate(requests):
            try:
                self.check(request)
                waiting.append((index, request))
            except CapacityError as error:
                refused.append(Chunk(index, [], 0, "refused", str(error)))
        running: list[Running] = []  # all that hold blocks, also while a chunk is handed out
        self._is_streaming = True
        try:
            yield from refused
            while waiting or running:
                yield from self._round(running, waiting)
        finally:
            self._is_streaming = False
            for state in running:
                self.allocator.free(state.blocks)

    def check(self, request: Request) -> None:
        """Refuse what can never run here.

        Raises:
            CapacityError: the prompt or the KV it may need is too long.
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

    def _admit(self, running: list[Running], waiting: deque[tuple[int, Request]]) -> None:
        """Prefill waiting requests, in order, while rows and blocks last, and let them join."""
        while waiting and len(running) < self.config.max_num_requests:
            index, request = waiting[0]
            needed = self._blocks_needed(request)
            if needed > self.allocator.num_free:
                break
            waiting.popleft()
            running.append(Running(index, request, self.allocator.allocate(needed), list(request.prompt_token_ids)))
            self._prefill(running[-1], row=len(running) - 1)

    def _prefill(self, state: Running, row: int) -> None:
        """Target and drafter KV of the prompt, and the first token; the prompt's last row is left to the propose."""
        prompt, last = state.token_ids, len(state.token_ids) - 1
        logits = None
        for start in range(0, len(prompt), self.prefill_chunk):
            chunk = prompt[start : start + self.prefill_chunk]
            logits = self.target.prefill(chunk, start, state.blocks)
            if self.drafter is not None:
                offset = self.drafter.position_offset
                first, count = start + 1 - offset, min(len(chunk), last - start + offset)
                self.drafter.prefill_prompt(prompt[first : first + count], start, state.blocks)
                if last < start + len(chunk):
                    _, aux_hidden = self.drafter.buffers.handed_over(self._rows)
                    own = aux_hidden[row * self._rows : (row + 1) * self._rows]
                    own.zero_()  # rows without a token: what they leave past the request's end is alike in every mode
                    own[0].copy_(self.drafter.prompts.buffers.aux_hidden[last - start])
        assert logits is not None
        token = sample_token(logits, state.request.temperature, state.request.seed, len(prompt))
        results = self.target.buffers.sliced(row + 1, self._rows)  # as if a verify had accepted nothing
        results.sampled_token_ids[row, 0].copy_(token)
        results.num_sampled[row].fill_(1)

    def _round(self, running: list[Running], waiting: deque[tuple[int, Request]]) -> list[Chunk]:
        """One pass over the batch; leaves in `running` what goes on, and gives each request's new tokens."""
        verified, num_drafts = len(running), self._rows - 1
        self._verify(running)
        # After the verify: that writes hidden states of padded rows too, and who joins needs its own for the propose.
        self._admit(running, waiting)
        results = self.target.buffers.sliced(len(running), num_drafts + 1)
        self._finished.start(torch.cat([results.sampled_token_ids, results.num_sampled[:, None].long()], dim=1))
        if self.drafter is not None:
            self._propose(self.drafter, running)
        chunks: list[Chunk] = []
        rounds: list[list[int]] = self._finished.read().tolist()
        for row, (state, (*sampled, count)) in enumerate(zip(running, rounds, strict=True)):
            if self.drafter is not None and num_drafts and row < verified:
                self.metrics.observe(count - 1)
            state.row = row
            state.token_ids += sampled[:count]
            chunks.append(state.cut(sampled[:count], count - 1, self.config.max_model_len))
        finished = [chunk.finish_reason is not None for chunk in chunks]
        for state, over in zip(running, finished, strict=True):
            if over:
                self.allocator.free(state.blocks)
        running[:] = [state for state, over in zip(running, finished, strict=True) if not over]
        return chunks

    def _verify(self, running: list[Running]) -> None:
        if not running:
            return
        n = len(running)
        b = self.target.buffers.sliced(n, self._rows)
        write(b.last_token_ids, [state.token_ids[-1] for state in running])
        starts = [state.position for state in running]
        write(b.start_positions, starts)
        self._write_blocks(b.block_table, running)
        self._write_sampling(b.temperature, b.seeds, running)
        if self.drafter is None:
            b.draft_token_ids.fill_(-1)
        else:
            rows, drafts, k = self._draft_rows[:n], self.drafter.buffers, self._rows - 1
            write(rows, [state.row for state in running])
            b.draft_token_ids.copy_(drafts.draft_token_ids[rows, :k])
            if b.draft_probs is not None and drafts.draft_probs is not None:
                b.draft_probs.copy_(drafts.draft_probs[rows, :k])
        self.target.verify(n, starts, self._rows)
        self.metrics.rounds += 1

    def _propose(self, drafter: Drafter, running: list[Running]) -> None:
        """Draft for the verified rows, where they stand, and for those after them that have just joined."""
        n, b = len(running), drafter.buffers
        plan = drafter.dispatch(n, self._rows)
        starts = [state.position for state in running]
        write(b.start_positions[:n], starts)
        b.num_sampled[n : plan.descriptor.num_requests].zero_()
        self._write_blocks(b.block_table, running)
        self._write_sampling(b.temperature, b.seeds, running)
        drafter.run(plan, start_positions=starts, num_sampled=self._counts)
        self._rows = plan.descriptor.num_speculative_tokens + 1

    def _counts(self) -> list[int]:
        return self._finished.read()[:, -1].tolist()

    def _write_blocks(self, table: Tensor, states: Iterable[Running]) -> None:
        width = table.shape[1]
        rows = [state.blocks + [NULL_BLOCK] * (width - len(state.blocks)) for state in states]
        write(table[: len(rows)], rows)

    def _write_sampling(self, temperature: Tensor, seeds: Tensor, states: Sequence[Running]) -> None:
        n = len(states)
        if self.config.sampled:
            write(temperature[:n], [s.request.temperature for s in states])
            write(seeds[:n], [s.request.seed for s in states])
        elif self.config.synthetic_acceptance is not None:  # requests of one seed must not all accept alike
            write(seeds[:n], [(s.request.seed + s.index) % 2**63 for s in states])
