"""The drafter's persistent tensors: all that a captured draft graph reads and writes, each with a name.

They are allocated once at the padded maximum and only ever written in place. A batch works on views of them: what
has rows per request is packed by the rows that this very batch has, so that views are contiguous at every length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor

from specgraph.attention import AttentionMetadata, allocate_block_table, allocate_metadata
from specgraph.drafting.config import DraftConfig


class PassRows(NamedTuple):
    """Rows a request in the parts of one propose."""

    first: int
    """The target's round, which step 0 takes: q."""
    later: int
    """Each pass after that: 1 in a chain, 1 + K in a parallel drafter's block."""
    carried: int
    """Hidden states that are kept from pass to pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftBuffers:
    """R requests, q rows each, K draft tokens. The first group is written by the engine before a propose."""

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
    """The later passes' metadata: one row a request, moved on by `advance`; or a parallel drafter's block."""
    step_token_ids: Tensor
    """int64 [R * later rows]: the latest draft token, the next step's input; or a parallel drafter's block."""
    hidden: Tensor
    """[R * carried rows, hidden_size]: the hidden states carried from step to step."""
    draft_step: Tensor
    """int64 [1]: the column of `draft_token_ids` to write, counted on the device."""

    draft_token_ids: Tensor
    """int64 [R, K]: the result. Overwritten by the next propose."""
    draft_probs: Tensor | None
    """float32 [R, K, draft_vocab]: what sampled drafts were drawn from."""
    query_start_locs: Mapping[int, Tensor]
    """int32 [R + 1] for each number of rows a request that a batch may have: constants."""
    rounds: Mapping[int, tuple[Tensor, Tensor]]
    """What `handed_over` gives for each q that a round may have: views, made once."""

    def named_tensors(self) -> dict[str, Tensor]:
        """Every tensor by name, for the read-set."""
        named: dict[str, Tensor] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, AttentionMetadata):
                named |= value.named_tensors(f"buffers.{field.name}")
            elif isinstance(value, Tensor):
                named[f"buffers.{field.name}"] = value
        return named | {f"buffers.query_start_loc.{rows}": t for rows, t in self.query_start_locs.items()}

    def handed_over(self, query_len: int) -> tuple[Tensor, Tensor]:
        """(sampled_token_ids [R, q], aux_hidden [R * q, aux_size]) for rounds of q = `query_len` rows a request."""
        return self.rounds[query_len]

    def sliced(self, num_requests: int, rows: PassRows, num_speculative_tokens: int) -> DraftBuffers:
        """The first `num_requests` requests of a batch with these rows and K: views of the same memory."""
        n, k = num_requests, num_speculative_tokens
        sampled, aux_hidden = self.handed_over(rows.first)
        return DraftBuffers(
            sampled_token_ids=sampled[:n],
            num_sampled=self.num_sampled[:n],
            start_positions=self.start_positions[:n],
            aux_hidden=aux_hidden[: n * rows.first],
            block_table=self.block_table[:n],
            temperature=self.temperature[:n],
            seeds=self.seeds[:n],
            token_ids=self.token_ids[: n * rows.first],
            last_rows=self.last_rows[:n],
            first=self._metadata(self.first, n, rows.first),
            step=self._metadata(self.step, n, rows.later),
            step_token_ids=self.step_token_ids[: n * rows.later],
            hidden=self.hidden[: n * rows.carried],
            draft_step=self.draft_step,
            draft_token_ids=self.draft_token_ids[:n, :k],
            draft_probs=None if self.draft_probs is None else self.draft_probs[:n, :k],
            query_start_locs=self.query_start_locs,
            rounds=self.rounds,
        )

    def _metadata(self, of: AttentionMetadata, num_requests: int, query_len: int) -> AttentionMetadata:
        start_loc = self.query_start_locs[query_len]
        return replace(of, query_start_loc=start_loc, query_len=query_len).sliced(num_requests)


def allocate_buffers(
    config: DraftConfig,
    rows: PassRows,
    *,
    aux_size: int,
    hidden_size: int,
    draft_vocab_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> DraftBuffers:
    """Buffers for `config`'s largest batch, every request inert.

    Args:
        rows: of a propose with the most draft tokens.
    """
    requests, steps = config.max_num_requests, config.num_speculative_tokens
    table = allocate_block_table(requests, config.max_blocks, device)

    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def start_loc(query_len: int) -> Tensor:
        return torch.arange(0, requests * query_len + 1, query_len, dtype=torch.int32, device=device)

    sampled, aux_hidden = zeros(requests * rows.first), zeros(requests * rows.first, aux_size, dtype=dtype)
    return DraftBuffers(
        sampled_token_ids=sampled.view(requests, rows.first),
        num_sampled=zeros(requests, dtype=torch.int32),
        start_positions=zeros(requests),
        aux_hidden=aux_hidden,
        block_table=table,
        temperature=zeros(requests, dtype=torch.float32),
        seeds=zeros(requests),
        token_ids=zeros(requests * rows.first),
        last_rows=zeros(requests),
        first=allocate_metadata(requests, rows.first, table),
        step=allocate_metadata(requests, rows.later, table),
        step_token_ids=zeros(requests * rows.later),
        hidden=zeros(requests * rows.carried, hidden_size, dtype=dtype),
        draft_step=zeros(1),
        draft_token_ids=zeros(requests, steps),
        draft_probs=zeros(requests, steps, draft_vocab_size, dtype=torch.float32) if config.sampled else None,
        # 2 rows: a parallel drafter's block where a schedule has K 0.
        query_start_locs={n: start_loc(n) for n in (1, 2, *config.query_lens)},
        rounds={n: (sampled[: requests * n].view(requests, n), aux_hidden[: requests * n]) for n in config.query_lens},
    )
