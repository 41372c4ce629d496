"""The drafter's persistent tensors: all that a captured draft graph reads and writes, each with a name.

They are allocated once at the padded maximum and only ever written in place.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from specgraph.attention import AttentionMetadata, allocate_block_table, allocate_metadata
from specgraph.drafting.config import DraftConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftBuffers:
    """R requests, q = K + 1 rows each, K draft tokens. The first group is written by the engine before a propose."""

    sampled_token_ids: Tensor
    """int64 [R, q]: per request the accepted draft tokens, then the target's own token, then anything."""
    num_sampled: Tensor
    """int32 [R]: accepted + 1; 0 makes the request inert."""
    start_positions: Tensor
    """int64 [R]: position of the first of the q rows."""
    aux_hidden: Tensor
    """[R * q, aux_size], model dtype: the target's hidden states of those rows."""
    block_table: Tensor
    """int32 [R, max_blocks], filled up with NULL_BLOCK."""
    temperature: Tensor
    """float32 [R]"""
    seeds: Tensor
    """int64 [R]"""

    token_ids: Tensor
    """int64 [R * q]: step 0's input tokens."""
    last_rows: Tensor
    """int64 [R]: the row of each request's last accepted token."""
    first: AttentionMetadata
    """Step 0's metadata, q rows a request."""
    step: AttentionMetadata
    """The later steps' metadata, one row a request, moved on by `advance`."""
    step_token_ids: Tensor
    """int64 [R]: the latest draft token, the next step's input."""
    hidden: Tensor
    """[R, hidden_size]: the hidden state carried from step to step."""
    draft_step: Tensor
    """int64 [1]: the column of `draft_token_ids` to write, counted on the device."""

    draft_token_ids: Tensor
    """int64 [R, K]: the result. Overwritten by the next propose."""
    draft_probs: Tensor | None
    """float32 [R, K, draft_vocab]: what sampled drafts were drawn from."""

    def named_tensors(self) -> dict[str, Tensor]:
        """Every tensor by name, for the read-set."""
        named: dict[str, Tensor] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, AttentionMetadata):
                named |= value.named_tensors(f"buffers.{field.name}")
            elif isinstance(value, Tensor):
                named[f"buffers.{field.name}"] = value
        return named

    def sliced(self, num_requests: int) -> DraftBuffers:
        """The first `num_requests` requests: views of the same memory."""
        n, rows = num_requests, num_requests * self.first.query_len
        return DraftBuffers(
            sampled_token_ids=self.sampled_token_ids[:n],
            num_sampled=self.num_sampled[:n],
            start_positions=self.start_positions[:n],
            aux_hidden=self.aux_hidden[:rows],
            block_table=self.block_table[:n],
            temperature=self.temperature[:n],
            seeds=self.seeds[:n],
            token_ids=self.token_ids[:rows],
            last_rows=self.last_rows[:n],
            first=self.first.sliced(n),
            step=self.step.sliced(n),
            step_token_ids=self.step_token_ids[:n],
            hidden=self.hidden[:n],
            draft_step=self.draft_step,
            draft_token_ids=self.draft_token_ids[:n],
            draft_probs=None if self.draft_probs is None else self.draft_probs[:n],
        )


def allocate_buffers(
    config: DraftConfig,
    *,
    aux_size: int,
    hidden_size: int,
    draft_vocab_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> DraftBuffers:
    """Buffers for `config`'s largest batch, every request inert."""
    requests, query_len, steps = config.max_num_requests, config.query_len, config.num_speculative_tokens
    rows = requests * query_len
    table = allocate_block_table(requests, config.max_blocks, device)

    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return DraftBuffers(
        sampled_token_ids=zeros(requests, query_len),
        num_sampled=zeros(requests, dtype=torch.int32),
        start_positions=zeros(requests),
        aux_hidden=zeros(rows, aux_size, dtype=dtype),
        block_table=table,
        temperature=zeros(requests, dtype=torch.float32),
        seeds=zeros(requests),
        token_ids=zeros(rows),
        last_rows=zeros(requests),
        first=allocate_metadata(requests, query_len, table),
        step=allocate_metadata(requests, 1, table),
        step_token_ids=zeros(requests),
        hidden=zeros(requests, hidden_size, dtype=dtype),
        draft_step=zeros(1),
        draft_token_ids=zeros(requests, steps),
        draft_probs=zeros(requests, steps, draft_vocab_size, dtype=torch.float32) if config.sampled else None,
    )
