"""The target on a platform: prefill of prompts, and verify passes of K + 1 rows a request through captured graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from specgraph import kernels
from specgraph.attention import (
    AttentionBackend,
    AttentionMetadata,
    HostLengths,
    KVCache,
    PagedAttention,
    allocate_block_table,
    allocate_metadata,
    named_cache_tensors,
)
from specgraph.drafting import DraftConfig, resolve
from specgraph.graphs import AttentionStack, BatchDescriptor, Body, Dispatch, GraphRunner, Recording, dispatch
from specgraph.models.protocol import Target, TargetOutput
from specgraph.platforms import Platform


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyBuffers:
    """The target's persistent tensors for R requests of q = K + 1 rows. The first group is written before a verify."""

    last_token_ids: Tensor
    """int64 [R]"""
    draft_token_ids: Tensor
    """int64 [R, K]; -1 is no draft token."""
    draft_probs: Tensor | None
    """float32 [R, K, draft_vocab]; None when drafts are greedy."""
    start_positions: Tensor
    """int64 [R]: position of the last token; -1 makes the request inert."""
    block_table: Tensor
    """int32 [R, max_blocks]"""
    temperature: Tensor
    """float32 [R]"""
    seeds: Tensor
    """int64 [R]"""

    token_ids: Tensor
    """int64 [R * q]"""
    metadata: AttentionMetadata

    sampled_token_ids: Tensor
    """int64 [R, q]: the result. A drafter's own buffer when there is one."""
    num_sampled: Tensor
    """int32 [R]: the result."""
    aux_hidden: Tensor
    """[R * q, aux_size]: the result."""

    def named_tensors(self) -> dict[str, Tensor]:
        """Every tensor by name, for the read-set."""
        own = {f"verify.{f.name}": v for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)}
        return own | self.metadata.named_tensors("verify.metadata")


@dataclass(frozen=True, slots=True)
class VerifyOutputs:
    """Where a verify leaves its results; shapes as in `VerifyBuffers`."""

    sampled_token_ids: Tensor
    num_sampled: Tensor
    aux_hidden: Tensor


class TargetRunner:
    """Owns the target's graphs and buffers; the KV caches belong to the caller."""

    def __init__(
        self,
        target: Target,
        caches: Sequence[KVCache],
        platform: Platform,
        config: DraftConfig,
        *,
        query_len: int,
        aux_layers: Sequence[int] = (),
        outputs: VerifyOutputs | None = None,
        draft_vocab_size: int | None = None,
        draft_to_target: Tensor | None = None,
        attention: AttentionBackend | None = None,
    ) -> None:
        """
        Args:
            config: limits, capture sizes and lowering; `sampled` decides the verify op.
            query_len: rows a request, K + 1.
            aux_layers: hidden states that the drafter takes; the final one when empty.
            outputs: where to put results; tensors of its own, without hidden states, by default.
            draft_vocab_size: columns of the draft distributions, for a sampled drafter.
            draft_to_target: the drafter's vocabulary map.
            attention: the core's paged attention by default.
        """
        self.target, self.caches, self.platform, self.config = target, tuple(caches), platform, config
        self.query_len, self.aux_layers, self.draft_to_target = query_len, tuple(aux_layers), draft_to_target
        self.attention: AttentionBackend = attention or PagedAttention()
        self.stack = AttentionStack(self.attention, target.attention_layers, self.caches)
        self.resolution = resolve(config.lowering, platform.capabilities, self.attention.host_parameters)
        self.buffers = self._allocate(outputs, draft_vocab_size)
        self.runner: GraphRunner | None = None
        if self.resolution.lowering != "eager":
            self.runner = GraphRunner(platform, self.read_set, check_inputs=config.check_inputs)

    def read_set(self) -> dict[str, Tensor]:
        """Every persistent tensor that a verify graph may touch, by name."""
        named = {f"weights.{name}": tensor for name, tensor in self.target.weights().items()}
        if self.draft_to_target is not None:
            named["draft_to_target"] = self.draft_to_target
        named |= self.attention.named_tensors()
        return {**named, **named_cache_tensors(self.caches, "kv_cache"), **self.buffers.named_tensors()}

    def capture(self) -> None:
        """Capture a verify graph for every size, largest first; does nothing in the eager lowering."""
        if self.runner is None:
            return
        self.buffers.start_positions.fill_(-1)
        for size in reversed(self.config.sizes):
            self.runner.capture(self._descriptor(size), self._body(size, None))

    def dispatch(self, num_requests: int) -> Dispatch:
        """The padded size that a batch runs at."""
        steps = self.query_len - 1
        return dispatch("verify", num_requests, self.query_len, steps, self.config.sizes)

    def verify(self, num_requests: int, start_positions: Sequence[int]) -> None:
        """One target pass over what stands in the buffers; results are in `buffers` until the next pass.

        Args:
            num_requests: real requests, in the first rows.
            start_positions: the same numbers as in the buffers, for attention with host parameters.
        """
        plan = self.dispatch(num_requests)
        size = plan.descriptor.num_requests
        self.buffers.start_positions[num_requests:size].fill_(-1)
        lengths = self._lengths(start_positions, size)
        if self.runner is not None and plan.captured:
            self.runner.replay(plan.descriptor, lengths)
        else:
            self._body(size, lengths)(None)

    def prefill(self, token_ids: Sequence[int], first_position: int, blocks: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Run one request's prompt chunk eagerly, writing its KV.

        Args:
            token_ids: T consecutive prompt tokens.
            first_position: position of the first of them.
            blocks: the request's KV blocks from position 0 on.

        Returns:
            (logits of the last row [vocab], aux hidden states [T, aux_size])
        """
        metadata = prompt_metadata(first_position, len(token_ids), blocks, self.config, self.platform.device)
        lengths = HostLengths([len(token_ids)], [first_position + len(token_ids)])
        ids = torch.tensor(token_ids, dtype=torch.int64, device=self.platform.device)
        out = self.target.forward(ids, self.stack.eager({0: lengths})(metadata, 0), self.aux_layers)
        return self.target.logits(out.hidden[-1:])[0], self._for_drafter(out)

    def close(self) -> None:
        """Release graphs and their memory."""
        if self.runner is not None:
            self.runner.close()

    def _for_drafter(self, out: TargetOutput) -> Tensor:
        return out.aux_hidden if self.aux_layers else out.hidden

    def _descriptor(self, size: int) -> BatchDescriptor:
        return BatchDescriptor("verify", size, self.query_len, self.query_len - 1)

    def _lengths(self, start_positions: Sequence[int], size: int) -> dict[int, HostLengths]:
        if not self.attention.host_parameters:
            return {}
        seq_lens = [start + self.query_len for start in start_positions]
        return {0: HostLengths([self.query_len] * size, seq_lens + [0] * (size - len(seq_lens)))}

    def _body(self, size: int, lengths: dict[int, HostLengths] | None) -> Body:
        b, rows = self.buffers, size * self.query_len
        metadata = b.metadata.sliced(size)
        probs = None if b.draft_probs is None else b.draft_probs[:size]

        def body(recording: Recording | None) -> None:
            if recording is None:
                make_attend = self.stack.eager(lengths or {})
            elif self.resolution.lowering == "piecewise":
                make_attend = self.stack.split(recording)
            else:
                make_attend = self.stack.captured(recording)
            kernels.begin_verify(
                b.last_token_ids[:size],
                b.draft_token_ids[:size],
                b.start_positions[:size],
                metadata.block_table,
                max_model_len=self.config.max_model_len,
                block_size=self.config.block_size,
                token_ids=b.token_ids[:rows],
                positions=metadata.positions,
                slot_mapping=metadata.slot_mapping,
                seq_lens=metadata.seq_lens,
            )
            out = self.target.forward(b.token_ids[:rows], make_attend(metadata, 0), self.aux_layers)
            if b.aux_hidden.shape[1]:
                b.aux_hidden[:rows].copy_(self._for_drafter(out))
            logits = self.target.logits(out.hidden)
            results = b.sampled_token_ids[:size], b.num_sampled[:size]
            if self.config.sampled:
                kernels.verify_sampled(
                    logits,
                    b.draft_token_ids[:size],
                    probs,
                    self.draft_to_target,
                    b.temperature[:size],
                    b.seeds[:size],
                    b.start_positions[:size],
                    *results,
                )
            else:
                kernels.verify_greedy(logits, b.draft_token_ids[:size], b.start_positions[:size], *results)

        return body

    def _allocate(self, outputs: VerifyOutputs | None, draft_vocab_size: int | None) -> VerifyBuffers:
        requests, q, device = self.config.max_num_requests, self.query_len, self.platform.device

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        if outputs is None:
            no_aux = zeros(requests * q, 0, dtype=self.target.dtype)
            outputs = VerifyOutputs(zeros(requests, q), zeros(requests, dtype=torch.int32), no_aux)
        probs = None
        if self.config.sampled and draft_vocab_size is not None:
            probs = zeros(requests, q - 1, draft_vocab_size, dtype=torch.float32)
        table = allocate_block_table(requests, self.config.max_blocks, device)
        return VerifyBuffers(
            last_token_ids=zeros(requests),
            draft_token_ids=zeros(requests, q - 1),
            draft_probs=probs,
            start_positions=zeros(requests) - 1,
            block_table=table,
            temperature=zeros(requests, dtype=torch.float32),
            seeds=zeros(requests),
            token_ids=zeros(requests * q),
            metadata=allocate_metadata(requests, q, table),
            sampled_token_ids=outputs.sampled_token_ids,
            num_sampled=outputs.num_sampled,
            aux_hidden=outputs.aux_hidden,
        )


def prompt_metadata(
    first_position: int, count: int, blocks: Sequence[int], config: DraftConfig, device: torch.device
) -> AttentionMetadata:
    """Metadata of `count` consecutive rows of one request."""
    size = config.block_size
    positions = range(first_position, first_position + count)
    slots = [blocks[position // size] * size + position % size for position in positions]
    return AttentionMetadata(
        query_start_loc=torch.tensor([0, count], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([first_position + count], dtype=torch.int32, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
        block_table=torch.tensor([list(blocks)], dtype=torch.int32, device=device),
        query_len=count,
    )
