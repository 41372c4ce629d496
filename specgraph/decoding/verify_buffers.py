"""The target's persistent tensors for verify passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from specgraph.attention import AttentionMetadata, allocate_block_table, allocate_metadata
from specgraph.drafting import DraftConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyBuffers:
    """R requests of q = K + 1 rows. The first group is written before a verify."""

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
    query_start_locs: Mapping[int, Tensor]
    """int32 [R + 1] for each q that a batch may have: constants."""

    def named_tensors(self) -> dict[str, Tensor]:
        """Every tensor by name, for the read-set."""
        own = {f"verify.{f.name}": v for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)}
        starts = {f"verify.query_start_loc.{rows}": tensor for rows, tensor in self.query_start_locs.items()}
        return {**own, **starts, **self.metadata.named_tensors("verify.metadata")}

    def sliced(self, num_requests: int, query_len: int) -> VerifyBuffers:
        """The first `num_requests` requests of a batch of `query_len` rows each: contiguous views."""
        n, rows, steps = num_requests, num_requests * query_len, query_len - 1
        probs = self.draft_probs
        whole = replace(self.metadata, query_start_loc=self.query_start_locs[query_len], query_len=query_len)
        return VerifyBuffers(
            last_token_ids=self.last_token_ids[:n],
            draft_token_ids=self.draft_token_ids.flatten()[: n * steps].view(n, steps),
            draft_probs=None if probs is None else probs.flatten(0, 1)[: n * steps].view(n, steps, probs.shape[2]),
            start_positions=self.start_positions[:n],
            block_table=self.block_table[:n],
            temperature=self.temperature[:n],
            seeds=self.seeds[:n],
            token_ids=self.token_ids[:rows],
            metadata=whole.sliced(n),
            sampled_token_ids=self.sampled_token_ids.flatten()[:rows].view(n, query_len),
            num_sampled=self.num_sampled[:n],
            aux_hidden=self.aux_hidden[:rows],
            query_start_locs=self.query_start_locs,
        )


@dataclass(frozen=True, slots=True)
class VerifyOutputs:
    """Where a verify leaves its results; shapes as in `VerifyBuffers`."""

    sampled_token_ids: Tensor
    num_sampled: Tensor
    aux_hidden: Tensor


def allocate_verify(
    config: DraftConfig,
    query_lens: Sequence[int],
    outputs: VerifyOutputs | None,
    draft_vocab_size: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> VerifyBuffers:
    """Buffers for `config`'s largest batch of any of the row counts, every request inert.

    Args:
        query_lens: rows a request that batches may have, ascending.
        outputs: where to put results; tensors of its own, without hidden states, when None.
        draft_vocab_size: columns of the draft distributions, for a sampled drafter.
    """
    requests, q = config.max_num_requests, query_lens[-1]

    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def start_loc(rows: int) -> Tensor:
        return torch.arange(0, requests * rows + 1, rows, dtype=torch.int32, device=device)

    if outputs is None:
        no_aux = zeros(requests * q, 0, dtype=dtype)
        outputs = VerifyOutputs(zeros(requests, q), zeros(requests, dtype=torch.int32), no_aux)
    probs = None
    if config.sampled and draft_vocab_size is not None:
        probs = zeros(requests, q - 1, draft_vocab_size, dtype=torch.float32)
    table = allocate_block_table(requests, config.max_blocks, device)
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
        query_start_locs={rows: start_loc(rows) for rows in query_lens},
    )
