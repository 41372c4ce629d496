"""The end of vLLM's round, written into the drafter's memory: one kernel on a GPU, plain torch elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specgraph import ProposeBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundEnd:
    """What vLLM's target pass and sampler leave for n requests of `query_len` = K + 1 rows each.

    vLLM's names where it has one. Rows of a request follow each other, and requests are in the order of the batch;
    what is kept per request slot is found through `idx_mapping`.
    """

    input_ids: Tensor
    """int32 [T], T >= n * query_len: the last token, then the K draft tokens, per request."""
    positions: Tensor
    """int64 [T]"""
    num_sampled: Tensor
    """int32 [n]: accepted + 1."""
    last_sampled: Tensor
    """int64 [max_num_reqs, 1], by request slot: the token that the target sampled last."""
    idx_mapping: Tensor
    """int32 [n]: the slot of each request."""
    block_table: Tensor
    """int32 [>= n, blocks], rows in the order of the batch. Entries past a request's blocks are stale."""
    hidden_states: Sequence[Tensor]
    """[T, target_hidden_size] each: those that the drafter takes of the target."""

    @property
    def num_requests(self) -> int:
        """n."""
        return self.num_sampled.shape[0]


def fill_round(end: RoundEnd, into: ProposeBatch, max_model_len: int, block_size: int) -> None:
    """Write the round into the drafter's memory. `into` may be padded: requests past n become inert.

    Request r sampled input_ids[1:num_sampled] of its rows and then its `last_sampled`. Of its block table only what
    this round and its drafts can reach is taken, ceil(min(start + 2 * K + 1, max_model_len) / block_size) entries,
    which vLLM has allocated; the rest is the null block.

    Args:
        into: at least n requests, of the drafter's `inputs`.
        max_model_len, block_size: in tokens.
    """
    if end.positions.is_cuda:
        from specgraph_vllm.round_end_triton import fill_round_on_gpu

        fill_round_on_gpu(end, into, max_model_len, block_size)
    else:
        fill_round_reference(end, into, max_model_len, block_size)


def fill_round_reference(end: RoundEnd, into: ProposeBatch, max_model_len: int, block_size: int) -> None:
    """`fill_round` in plain torch."""
    n, query_len = end.num_requests, into.query_len
    rows = n * query_len
    ids = end.input_ids[:rows].view(n, query_len).long()
    count = end.num_sampled.long()[:, None]
    column = torch.arange(query_len, device=ids.device)
    last = end.last_sampled.view(-1)[end.idx_mapping.long()][:, None]
    sampled = torch.where(column < count - 1, ids.roll(-1, 1), torch.where(column == count - 1, last, 0))
    into.sampled_token_ids[:n] = sampled
    into.num_sampled[:n] = end.num_sampled
    into.num_sampled[n:] = 0
    starts = end.positions[:rows:query_len]
    into.start_positions[:n] = starts
    into.aux_hidden[:rows] = torch.cat([states[:rows] for states in end.hidden_states], dim=1)
    ends = (starts + 2 * query_len - 1).clamp(max=max_model_len)
    width = min(end.block_table.shape[1], into.block_table.shape[1])
    owned = torch.arange(width, device=ids.device) * block_size < ends[:, None]
    into.block_table[:n] = 0
    into.block_table[:n, :width] = torch.where(owned, end.block_table[:n, :width], 0)
