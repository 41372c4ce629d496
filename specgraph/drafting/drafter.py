"""The drafter: a head, its KV cache and its captured graphs on one platform.

It needs no target. An engine hands over what its own round produced (`ProposeBatch`) and gets draft tokens; or it
writes the buffers itself and calls `run`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
from specgraph.drafting.config import DraftConfig
from specgraph.drafting.host_lengths import AcceptedCounts, LateLengths
from specgraph.drafting.lowering import Launch, launches, resolve
from specgraph.drafting.program import ChainProgram, DraftProgram
from specgraph.errors import CapacityError, ConfigError
from specgraph.graphs import (
    AttentionStack,
    BatchDescriptor,
    Body,
    Dispatch,
    GraphRunner,
    Recording,
    StepLengths,
    dispatch,
)
from specgraph.models.protocol import DraftHead
from specgraph.platforms import Platform


class Drafter:
    """Proposes K draft tokens for a batch of requests, through graphs captured once at start-up.

    Not thread-safe: one propose at a time. Owns its graphs and buffers; the KV caches belong to the caller.
    """

    def __init__(
        self,
        head: DraftHead,
        caches: Sequence[KVCache],
        platform: Platform,
        config: DraftConfig,
        *,
        attention: AttentionBackend | None = None,
    ) -> None:
        """
        Args:
            head: the draft model.
            caches: one KV cache per attention layer of the head.
            platform: where to run.
            config: limits and choices.
            attention: the attention backend; the core's paged attention with device parameters by default.

        Raises:
            ConfigError: the caches don't fit the head or the config.
            UnsupportedError: the asked lowering is not possible on this platform.
        """
        _check_caches(head, caches, config)
        self.head, self.caches, self.platform, self.config = head, tuple(caches), platform, config
        self.attention: AttentionBackend = attention or PagedAttention()
        self.resolution = resolve(config.lowering, platform.capabilities, self.attention.host_parameters)
        self.stack = AttentionStack(self.attention, head.attention_layers, self.caches)
        self.program: DraftProgram = ChainProgram(head, self.attention, config)
        self.buffers = allocate_buffers(
            config,
            aux_size=head.aux_size,
            hidden_size=head.hidden_size,
            draft_vocab_size=head.draft_vocab_size,
            dtype=head.dtype,
            device=platform.device,
        )
        self.num_proposes = 0
        """Proposes so far."""
        self._launches = launches(self.resolution.lowering, self.program.num_steps)
        self._accepted = AcceptedCounts(platform, config.max_num_requests)
        self.runner: GraphRunner | None = None
        if self.resolution.lowering != "eager":
            self.runner = GraphRunner(platform, self.read_set, check_inputs=config.check_inputs)

    def read_set(self) -> dict[str, Tensor]:
        """Every persistent tensor that a draft graph may touch, by name."""
        weights = {f"weights.{name}": tensor for name, tensor in self.head.weights().items()}
        caches = named_cache_tensors(self.caches, "kv_cache")
        return {**weights, **caches, **self.buffers.named_tensors(), **self.attention.named_tensors()}

    def capture(self) -> None:
        """Capture every size, largest first; does nothing in the eager lowering.

        Raises:
            CaptureError: a capture failed. With fallback 'eager' the caller may go on with a drafter whose lowering is
                'eager'; nothing falls back by itself.
        """
        if self.runner is None:
            return
        self.buffers.num_sampled.zero_()  # warm-up really runs: every request is inert
        self.buffers.step.seq_lens.zero_()
        for size in reversed(self.config.sizes):
            for launch in {launch.phase: launch for launch in self._launches}.values():
                self.runner.capture(self._descriptor(launch, size), self._body(launch, size))

    def propose(self, batch: ProposeBatch) -> DraftTokens:
        """Draft K tokens for each request of `batch`.

        Raises:
            ConfigError: a tensor of the batch has the wrong shape; both shapes are named.
            CapacityError: the batch is larger than max_num_requests, or than every captured size with fallback
                'error'. Nothing was run.
        """
        plan = self.dispatch(batch.num_requests)
        load_batch(self.buffers, batch)
        self.run(plan, start_positions=batch.host_start_positions, num_sampled=batch.host_num_sampled)
        n = batch.num_requests
        probs = self.buffers.draft_probs
        # The graph overwrites its outputs at the next replay, so what is handed out is a copy.
        return DraftTokens(self.buffers.draft_token_ids[:n].clone(), None if probs is None else probs[:n].clone(), plan)

    def dispatch(self, num_requests: int) -> Dispatch:
        """The padded size that a batch runs at.

        Raises:
            CapacityError: as in `propose`.
        """
        if not 1 <= num_requests <= self.config.max_num_requests:
            raise CapacityError(
                f"a batch of {num_requests} requests: this drafter takes 1 to {self.config.max_num_requests} "
                "(max_num_requests)"
            )
        # Eager pads too: matmuls change their last bit with the number of rows.
        plan = dispatch("propose", num_requests, self.config.query_len, self.program.num_steps, self.config.sizes)
        if not plan.captured and self.config.fallback == "error" and self.runner is not None:
            raise CapacityError(f"{plan.reason}, and fallback is 'error'")
        return plan

    def run(
        self,
        plan: Dispatch,
        *,
        start_positions: Sequence[int] | None = None,
        num_sampled: Sequence[int] | None = None,
    ) -> None:
        """Draft from what stands in the buffers; the result is in `buffers.draft_token_ids` until the next run.

        The caller has made every request after its own inert (num_sampled 0) up to the padded size.

        Args:
            plan: from `dispatch`.
            start_positions, num_sampled: the same numbers as in the buffers, one a real request; needed by attention
                with host parameters. Without `num_sampled` they are copied to the host while the propose starts;
                without `start_positions` both are read from the device, which waits for it.
        """
        size = plan.descriptor.num_requests
        lengths = self._lengths(size, start_positions, num_sampled)
        self.num_proposes += 1
        for launch in self._launches:
            captured = {} if lengths is None else lengths(launch)
            if self.runner is not None and plan.captured:
                self.runner.replay(self._descriptor(launch, size), captured)
            else:
                self._body(launch, size, captured)(None)

    def prefill(
        self, token_ids: Tensor, aux_hidden: Tensor, metadata: AttentionMetadata, lengths: HostLengths | None = None
    ) -> None:
        """Write the drafter's KV for prompt rows, eagerly; drafts nothing.

        A prompt's last row is not prefilled: it enters the next propose as a request with num_sampled 1.

        Args:
            token_ids: int64 [T], the token after each row's position.
            aux_hidden: [T, aux_size], the target's hidden states of the rows.
            metadata: ragged or uniform, T rows.
            lengths: for attention with host parameters.
        """
        if token_ids.shape[0] == 0:
            return
        attend = self.stack.eager({} if lengths is None else {0: lengths})(metadata, 0)
        self.head.forward(token_ids, self.head.combine(aux_hidden), attend)

    def close(self) -> None:
        """Release graphs and their memory."""
        if self.runner is not None:
            self.runner.close()

    def _descriptor(self, launch: Launch, size: int) -> BatchDescriptor:
        rows = 1 if launch.phase == "step" else self.config.query_len
        return BatchDescriptor(launch.phase, size, rows, self.program.num_steps)

    def _lengths(
        self, size: int, start_positions: Sequence[int] | None, num_sampled: Sequence[int] | None
    ) -> Callable[[Launch], StepLengths] | None:
        """Host lengths of each launch, None for attention without host parameters. What is not given is read late."""
        if not self.attention.host_parameters:
            return None
        if start_positions is None:
            counts: list[int] = self.buffers.num_sampled[:size].tolist()
            live = max((i + 1 for i, count in enumerate(counts) if count > 0), default=0)
            start_positions, num_sampled = self.buffers.start_positions[:live].tolist(), counts[:live]
        starts, given = start_positions, num_sampled
        if given is None and self.program.num_steps > 1:
            self._accepted.start(self.buffers.num_sampled[: len(starts)])
        read = self._accepted.read if given is None else lambda: given
        query_len = self.config.query_len

        def of(launch: Launch) -> StepLengths:
            steps = dict(zip(launch.captured_steps, launch.steps, strict=True))
            return LateLengths(starts, read, query_len, size, steps)

        return of

    def _body(self, launch: Launch, size: int, lengths: StepLengths | None = None) -> Body:
        """The device work of one launch: called with None to run it, with a recording to have it captured."""
        buffers = self.buffers.sliced(size)

        def body(recording: Recording | None) -> None:
            if recording is None:
                make_attend = self.stack.eager(lengths or {})
            elif self.resolution.lowering == "piecewise":
                make_attend = self.stack.split(recording)
            else:
                make_attend = self.stack.captured(recording)
            for step in launch.captured_steps:
                if step == 0:
                    self.program.first(buffers, make_attend)
                else:
                    self.program.step(buffers, make_attend, step)

        return body


def _check_caches(head: DraftHead, caches: Sequence[KVCache], config: DraftConfig) -> None:
    if len(caches) != len(head.attention_layers):
        raise ConfigError(
            f"the drafter has {len(head.attention_layers)} attention layer(s), got {len(caches)} KV caches"
        )
    for layer, cache in zip(head.attention_layers, caches, strict=True):
        wanted = (config.block_size, layer.num_kv_heads, layer.head_dim)
        for name, tensor in (("key", cache.key), ("value", cache.value)):
            if tuple(tensor.shape[1:]) != wanted:
                raise ConfigError(
                    f"the drafter's {name} cache is {list(tensor.shape)}; needed is [num_blocks, block_size, "
                    f"num_kv_heads, head_dim] = [*, {', '.join(map(str, wanted))}]"
                )
