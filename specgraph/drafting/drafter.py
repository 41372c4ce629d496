"""The drafter: a head, its KV cache and its captured graphs on one platform.

It needs no target. An engine hands over what its own round produced (`ProposeBatch`) and gets draft tokens; or it
writes the buffers itself and calls `run`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from specgraph.attention import (
    AttentionBackend,
    AttentionMetadata,
    HostLengths,
    KVCache,
    PagedAttention,
    named_cache_tensors,
)
from specgraph.drafting.batch import DraftTokens, ProposeBatch, load_batch
from specgraph.drafting.buffers import allocate_buffers
from specgraph.drafting.choose import check_caches, choose_program, position_offset
from specgraph.drafting.config import DraftConfig
from specgraph.drafting.host_lengths import Counts, HostRounds, LateLengths
from specgraph.drafting.lowering import Launch, launches, resolve
from specgraph.drafting.prompt import PromptBuffers, allocate_prompt
from specgraph.drafting.prompt_passes import PromptPasses
from specgraph.errors import CapacityError, ConfigError
from specgraph.graphs import (
    AttentionStack,
    BatchDescriptor,
    Body,
    Dispatch,
    GraphMode,
    GraphRunner,
    MakeAttend,
    Recording,
    StepLengths,
    dispatch,
    padded_size,
)
from specgraph.models.protocol import DraftHead, ParallelHead
from specgraph.platforms import Platform


class Drafter:
    """Proposes K draft tokens for a batch of requests, through graphs captured once at start-up.

    Not thread-safe: one propose at a time. Owns its graphs and buffers; the KV caches belong to the caller.
    """

    def __init__(
        self,
        head: DraftHead | ParallelHead,
        caches: Sequence[KVCache],
        platform: Platform,
        config: DraftConfig,
        *,
        attention: AttentionBackend | None = None,
    ) -> None:
        """
        Args:
            head: the draft model; its kind decides the draft program.
            caches: one KV cache per attention layer of the head.
            platform: where to run.
            config: limits and choices.
            attention: the attention backend; the core's paged attention with device parameters by default.

        Raises:
            ConfigError: the caches don't fit the head or the config, or the head can't draft K tokens.
            UnsupportedError: the asked lowering is not possible on this platform.
        """
        check_caches(head, caches, config)
        self.head, self.caches, self.platform, self.config = head, tuple(caches), platform, config
        self.attention: AttentionBackend = attention or PagedAttention()
        self.resolution = resolve(config.lowering, platform.capabilities, self.attention.host_parameters, config.mode)
        self.stack = AttentionStack(self.attention, head.attention_layers, self.caches)
        self.program = choose_program(head, self.stack, config)
        self.buffers = allocate_buffers(
            config,
            self.program.rows(config.query_len, config.num_speculative_tokens),
            aux_size=head.aux_size,
            hidden_size=head.hidden_size,
            draft_vocab_size=head.draft_vocab_size,
            dtype=head.dtype,
            device=platform.device,
        )
        self.num_proposes = 0
        """Proposes so far."""
        self._plans: dict[tuple[int, int], Dispatch] = {}
        self._known_launches: dict[BatchDescriptor, tuple[tuple[Launch, BatchDescriptor], ...]] = {}
        self._host_rounds = HostRounds(platform, config.max_num_requests)
        self.runner: GraphRunner | None = None
        if self.resolution.mode is not GraphMode.NONE:
            self.runner = GraphRunner(platform, self.read_set, check_inputs=config.check_inputs)
        self.prompts = PromptPasses(
            allocate_prompt(config, head.aux_size, head.dtype, platform.device),
            self.stack,
            config,
            self._prefill,
            mode=self.resolution.mode.prefill,
            num_steps=self.program.prefill_steps,
            runner=self.runner
            and GraphRunner(platform, self.read_set, check_inputs=config.check_inputs, beside=self.runner),
        )

    @property
    def position_offset(self) -> int:
        """0: prompt rows take the token after their position. 1 (`OffsetHead`): each its own, the last one too."""
        return position_offset(self.head)

    def read_set(self) -> dict[str, Tensor]:
        """Every persistent tensor that a draft graph may touch, by name."""
        weights = {f"weights.{name}": tensor for name, tensor in self.head.weights().items()}
        caches = named_cache_tensors(self.caches, "kv_cache")
        buffers = {**self.buffers.named_tensors(), **self.prompts.buffers.named_tensors()}
        return {**weights, **caches, **buffers, **self.attention.named_tensors()}

    def capture(self) -> None:
        """Capture every size that the mode asks for, largest first; does nothing in mode NONE.

        Raises:
            CaptureError: a capture failed. With fallback 'eager' the caller may go on with a drafter whose lowering is
                'eager'; nothing falls back by itself.
        """
        if self.runner is None:
            return
        self.prompts.capture()
        self.buffers.num_sampled.zero_()  # warm-up really runs: every request is inert
        self.buffers.step.seq_lens.zero_()
        for plan in self.captures():
            for launch, descriptor in self._launches(plan):
                if descriptor not in self.runner:  # one step graph serves several steps, and every query_len
                    self.runner.capture(descriptor, self._body(launch, plan))

    def captures(self) -> list[BatchDescriptor]:
        """The propose batches that are captured, largest first: every size after rounds of every length."""
        sizes, lengths = reversed(self.config.sizes), self.config.query_lens
        return [
            BatchDescriptor("propose", size, query_len, self.config.draft_tokens(size))
            for size in sizes
            for query_len in reversed(lengths)
        ]

    def launched(self, batch: BatchDescriptor) -> list[BatchDescriptor]:
        """The graphs that a propose of a padded batch replays, in order."""
        return [descriptor for _, descriptor in self._launches(batch)]

    def propose(self, batch: ProposeBatch) -> DraftTokens:
        """Draft K tokens for each request of `batch`; K follows the batch where there is a schedule.

        Raises:
            ConfigError: a tensor of the batch has the wrong shape; both shapes are named.
            CapacityError: the batch is larger than max_num_requests, or than every captured size with fallback
                'error'. Nothing was run.
        """
        plan = self.dispatch(batch.num_requests, batch.query_len)
        load_batch(self.buffers, batch)
        self.run(plan, start_positions=batch.host_start_positions, num_sampled=batch.host_num_sampled)
        n, k = batch.num_requests, plan.descriptor.num_speculative_tokens
        drafts, probs = self.buffers.draft_token_ids[:n, :k], self.buffers.draft_probs
        # The graph overwrites its outputs at the next replay, so what is handed out is a copy.
        return DraftTokens(drafts.clone(), None if probs is None else probs[:n, :k].clone(), plan)

    def dispatch(self, num_requests: int, query_len: int | None = None) -> Dispatch:
        """The padded size that a batch runs at, and the K that goes with it.

        Args:
            query_len: rows a request in the target's round; of the most draft tokens by default.

        Raises:
            CapacityError: as in `propose`.
            ConfigError: no K of this drafter makes rounds of that many rows.
        """
        key = num_requests, self.config.query_len if query_len is None else query_len
        if (plan := self._plans.get(key)) is None:
            plan = self._plans[key] = self._plan(*key)
        return plan

    def _plan(self, num_requests: int, query_len: int) -> Dispatch:
        if query_len not in self.config.query_lens:
            raise ConfigError(
                f"a round of {query_len} rows a request; with this drafter's K they are "
                f"{', '.join(map(str, self.config.query_lens))} (K + 1)"
            )
        if not 1 <= num_requests <= self.config.max_num_requests:
            raise CapacityError(
                f"a batch of {num_requests} requests: this drafter takes 1 to {self.config.max_num_requests} "
                "(max_num_requests)"
            )
        # Eager pads too: matmuls change their last bit with the number of rows.
        k = self.config.draft_tokens(padded_size(num_requests, self.config.sizes) or num_requests)
        plan = dispatch("propose", num_requests, query_len, k, self.config.sizes)
        if not plan.captured and self.config.fallback == "error" and self.runner is not None:
            raise CapacityError(f"{plan.reason}, and fallback is 'error'")
        return plan

    def run(
        self,
        plan: Dispatch,
        *,
        start_positions: Sequence[int] | None = None,
        num_sampled: Counts | None = None,
    ) -> None:
        """Draft from what stands in the buffers; the result is in `buffers.draft_token_ids` until the next run.

        The caller has made every request after its own inert (num_sampled 0) up to the padded size.

        Args:
            plan: from `dispatch`.
            start_positions, num_sampled: the same numbers as in the buffers, one a real request; needed by attention
                with host parameters. `num_sampled` may be a function, called when they are needed. Without it they are
                copied to the host while the propose starts; without `start_positions` both are read from the device,
                which waits for it.
        """
        batch = plan.descriptor
        at = None
        if self.attention.host_parameters:
            computed = replace(batch, num_speculative_tokens=_computed_tokens(batch))
            now = self._host_rounds.round(computed, self.buffers, start_positions, num_sampled)
            at = partial(self.program.host_lengths, host_round=now)
        self.num_proposes += 1
        for launch, descriptor in self._launches(batch):
            captured: StepLengths = {}
            if at is not None:
                captured = LateLengths(at, dict(zip(launch.captured_steps, launch.steps, strict=True)))
            if self.runner is not None and plan.captured:
                self.runner.replay(descriptor, captured)
            else:
                self._body(launch, batch, captured)(None)

    def prefill_prompt(
        self,
        token_ids: Sequence[int],
        first_position: int,
        blocks: Sequence[int],
        aux_hidden: Tensor | None = None,
    ) -> None:
        """Write the drafter's KV for consecutive rows of one prompt, as the mode says; drafts nothing.

        A prompt's last row is not prefilled: it enters the next propose as a request with num_sampled 1. Where
        `position_offset` is 1, rows take their own tokens instead, and the last one is prefilled too.

        Args:
            token_ids: the token after each row's position (see above); at most the largest prompt size.
            first_position: position of the first row.
            blocks: the request's KV blocks from position 0 on.
            aux_hidden: [rows, aux_size], the target's hidden states; None where they stand in `prompts.buffers`.

        Raises:
            CapacityError: more rows than the largest prompt size; nothing was run.
        """
        if not token_ids:
            return
        if aux_hidden is not None:
            self.prompts.buffers.aux_hidden[: len(token_ids)].copy_(aux_hidden)
        self.prompts.run(token_ids, first_position, blocks)

    def prefill(
        self, token_ids: Tensor, aux_hidden: Tensor, metadata: AttentionMetadata, lengths: HostLengths | None = None
    ) -> None:
        """As `prefill_prompt` for a batch with metadata of the engine's own, ragged or not; always eager.

        Args:
            token_ids: int64 [T], the token after each row's position.
            aux_hidden: [T, aux_size], the target's hidden states of the rows.
            metadata: T rows.
            lengths: for attention with host parameters.
        """
        if token_ids.shape[0] == 0:
            return
        every = {} if lengths is None else dict.fromkeys(range(self.program.prefill_steps), lengths)
        self.program.prefill(token_ids, aux_hidden, metadata, self.stack.eager(every), None)

    def close(self) -> None:
        """Release graphs and their memory."""
        for runner in (self.runner, self.prompts.runner):
            if runner is not None:
                runner.close()

    def _launches(self, batch: BatchDescriptor) -> tuple[tuple[Launch, BatchDescriptor], ...]:
        """Each launch of a propose, and what it is captured as. Worked out once, to save the host microseconds."""
        if (known := self._known_launches.get(batch)) is None:
            steps = self.program.num_steps(_computed_tokens(batch))
            every = launches(self.resolution.lowering, steps, self.program.steps_differ)
            known = self._known_launches[batch] = tuple((launch, self._descriptor(launch, batch)) for launch in every)
        return known

    def _descriptor(self, launch: Launch, batch: BatchDescriptor) -> BatchDescriptor:
        if launch.phase != "step":
            return replace(batch, phase=launch.phase)
        if self.program.steps_differ:
            return replace(batch, phase="step", step=launch.captured_steps[0])
        return replace(batch, phase="step", query_len=1)

    def _body(self, launch: Launch, batch: BatchDescriptor, lengths: StepLengths | None = None) -> Body:
        """The device work of one launch: called with None to run it, with a recording to have it captured."""
        k, mode = _computed_tokens(batch), self.resolution.mode.decode
        buffers = self.buffers.sliced(batch.num_requests, self.program.rows(batch.query_len, k), k)

        def body(recording: Recording | None) -> None:
            make_attend = self.stack.attend_in(recording, mode, lengths)
            for step in launch.captured_steps:
                if step == 0:
                    self.program.first(buffers, make_attend)
                else:
                    self.program.step(buffers, make_attend, step)

        return body

    def _prefill(self, prompt: PromptBuffers, make_attend: MakeAttend) -> None:
        self.program.prefill(prompt.token_ids, prompt.aux_hidden, prompt.metadata, make_attend, prompt.last_row)


def _computed_tokens(batch: BatchDescriptor) -> int:
    """Draft tokens that the passes make. With K 0 the first pass runs for its KV, and its token is handed to nobody."""
    return max(1, batch.num_speculative_tokens)
