"""Drafts without a model: find the text's last n-gram earlier in the text, and draft the tokens that followed it there.

The texts are on the device, one token per KV slot; see `NgramHead`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specgraph.ops.library import op
from specgraph.ops.slots import NULL_BLOCK


@op(writes=("history",))
def keep_tokens(token_ids: Tensor, slot_mapping: Tensor, history: Tensor) -> None:
    """Write each token to its slot of the history.

    Args:
        token_ids: int64 [T].
        slot_mapping: int64 [T]; a token with a negative slot is not kept.
        history: int32 [num_blocks, block_size], written. The contents of the null block mean nothing.
    """
    kept = torch.where(slot_mapping < 0, 0, token_ids).to(history.dtype)
    history.view(-1).index_put_((slot_mapping.clamp(min=0),), kept)


@op(writes=("draft_token_ids",))
def ngram_propose(
    history: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    prompt_lookup_min: int,
    prompt_lookup_max: int,
    max_model_len: int,
    draft_token_ids: Tensor,
) -> None:
    """Find the longest n-gram at a text's end that also stands earlier in it, and draft the tokens that followed there.

    An n-gram has at least prompt_lookup_min and at most prompt_lookup_max tokens. It may overlap the text's end. If it
    stands at several places, the last one counts, as in vLLM's n-gram drafts on the device; vLLM's "ngram" on the host
    takes the first. If fewer than K tokens follow, they are repeated. Without a match the last token is repeated: a
    verify has rows for K drafts in any case.

    Args:
        history: int32 [num_blocks, block_size], a token per KV slot.
        block_table: int32 [R, max_blocks]. A position in the null block matches nothing.
        seq_lens: int32 [R]: the number of tokens of each text; 0 for inert requests. Tokens past max_model_len are
            ignored.
        prompt_lookup_min, prompt_lookup_max: the number of tokens of an n-gram, at least 1.
        draft_token_ids: int64 [R, K], written; 0 for inert requests.
    """
    there = (block_table != NULL_BLOCK)[:, :, None]
    text = torch.where(there, history[block_table.long()], -1).flatten(1)
    width = text.shape[1]
    place = torch.arange(width, device=text.device)
    length = seq_lens.clamp(max=max_model_len).long()[:, None]
    matches, matched = place < length - 1, torch.zeros_like(text)
    for back in range(min(prompt_lookup_max, width)):  # the distance of a token from the last one of an n-gram
        last = text.gather(1, (length - 1 - back).clamp(min=0))
        earlier = torch.nn.functional.pad(text[:, : width - back], (back, 0), value=-1)
        matches = matches & (earlier == last) & (last >= 0)
        matched = matched + matches
    score = torch.where(matched >= prompt_lookup_min, matched.long() * width + place, -1)
    best, at = score.max(dim=1, keepdim=True)
    begin = torch.where(best >= 0, at + 1, (length - 1).clamp(min=0))
    column = torch.arange(draft_token_ids.shape[1], device=text.device)
    drafts = text.gather(1, begin + column % (length - begin).clamp(min=1)).clamp(min=0)
    draft_token_ids.copy_(torch.where(length > 0, drafts, 0))
