"""The end of SGLang's round, written into the drafter's memory: one kernel on a GPU, plain torch elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specgraph import ProposeBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundEnd:
    """What SGLang's verify leaves for n requests of `query_len` = K + 1 rows each, with SGLang's names."""

    next_token_ids: Tensor
    """integer [n * query_len]: the token after each row; the first `accept_lens` of a request are its new tokens."""
    accept_lens: Tensor
    """integer [n]: accepted + 1."""
    seq_lens: Tensor
    """integer [n]: tokens in the KV cache before this round: the position of each request's first row."""
    req_pool_indices: Tensor
    """integer [n]: the row of each request in `req_to_token`."""
    req_to_token: Tensor
    """int32 [rows, columns]: the KV slot of each position. Entries past what a request has been given are stale."""
    hidden_states: Tensor
    """[n * query_len, aux_size]"""

    @property
    def num_requests(self) -> int:
        """n."""
        return self.accept_lens.shape[0]


def fill_round(end: RoundEnd, into: ProposeBatch, max_model_len: int, page_size: int) -> None:
    """Write the round into the drafter's memory. `into` may be padded: requests past n become inert.

    Of a request's slots only the pages that this round and its drafts can reach are taken,
    ceil(min(start + 2 * K + 1, max_model_len) / page_size), which SGLang has given it; the rest is page 0, which
    SGLang keeps for padding.

    Args:
        into: at least n requests, of the drafter's `inputs`.
        max_model_len, page_size: in tokens.
    """
    if end.hidden_states.is_cuda:
        from specgraph_sglang.round_end_triton import fill_round_on_gpu

        fill_round_on_gpu(end, into, max_model_len, page_size)
    else:
        fill_round_reference(end, into, max_model_len, page_size)


def fill_round_reference(end: RoundEnd, into: ProposeBatch, max_model_len: int, page_size: int) -> None:
    """`fill_round` in plain torch."""
    n, query_len = end.num_requests, into.query_len
    column = torch.arange(query_len, device=end.accept_lens.device)
    tokens = end.next_token_ids.view(n, query_len).long()
    into.sampled_token_ids[:n] = torch.where(column < end.accept_lens.long()[:, None], tokens, 0)
    into.num_sampled[:n] = end.accept_lens
    into.num_sampled[n:] = 0
    into.start_positions[:n] = end.seq_lens
    into.aux_hidden[: n * query_len] = end.hidden_states
    reach = (end.seq_lens.long() + 2 * query_len - 1).clamp(max=max_model_len)
    pages = end.req_to_token[end.req_pool_indices.long(), ::page_size] // page_size
    width = min(pages.shape[1], into.block_table.shape[1])
    owned = torch.arange(width, device=pages.device) * page_size < reach[:, None]
    into.block_table[:n] = 0
    into.block_table[:n, :width] = torch.where(owned, pages[:, :width], 0)
