"""Launching the Triton kernels that accept draft tokens."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

import torch
from torch import Tensor

from specgraph.kernels import verify
from specgraph.kernels.launch import Launcher, ceil_div, contiguous_rows, power_of_two
from specgraph.ops.rejection import Acceptance, Sampled

_COLUMNS = 4096
"""Columns of logits per program."""


class VerifyOps(Launcher):
    """Implementations of the ops in `specgraph.ops.rejection`."""

    __slots__ = ()

    def verify_drafts(
        self, target_logits: Tensor, draft_token_ids: Tensor, start_positions: Tensor, acceptance: Acceptance,
        sampled: Sampled,
    ) -> None:  # fmt: skip
        (requests, steps), (rows, vocab) = draft_token_ids.shape, target_logits.shape
        if requests == 0:
            return
        require_rows(sampled)
        logits, drafts = contiguous_rows(target_logits), contiguous_rows(draft_token_ids)
        starts, (tokens, num_sampled) = start_positions.contiguous(), sampled
        temperature, seeds, draft_probs, draft_to_target, chances = acceptance
        by_temperature = temperature is not None
        if not by_temperature or draft_probs is None:
            draft_probs = draft_to_target = None  # draft tokens are target ids, and nothing else of the drafter is read
        elif draft_probs.stride(-1) != 1:
            draft_probs = draft_probs.contiguous()
        blocks = ceil_div(vocab, _COLUMNS)

        def floats(*shape: int) -> Tensor:
            return logits.new_empty(shape, dtype=torch.float32)

        def integers(*shape: int) -> Tensor:
            return logits.new_empty(shape, dtype=torch.int32)

        value, index = floats(rows, blocks), integers(rows, blocks)
        total = decided = top = whole = draft_ids = None
        if by_temperature:
            total, decided = floats(rows, blocks), integers(requests)
            top, whole = floats(requests), floats(requests)
        if draft_to_target is not None:
            draft_ids = integers(vocab)
        draft_vocab = 0 if draft_probs is None else draft_probs.shape[2]
        prob_strides = (0, 0) if draft_probs is None else (draft_probs.stride(0), draft_probs.stride(1))
        self.launch(
            verify.scan_kernel, (rows, blocks),
            logits, starts, temperature, draft_to_target, value, index, total, draft_ids, vocab, draft_vocab,
            logits.stride(0), blocks, steps + 1, COLUMNS=_COLUMNS, num_warps=8,
        )  # fmt: skip
        self.launch(
            verify.decide_kernel, (requests,),
            logits, drafts, draft_probs, draft_to_target, draft_ids, temperature, seeds, chances, starts, value, index,
            total, tokens, num_sampled, decided, top, whole, draft_vocab, logits.stride(0), drafts.stride(0),
            *prob_strides, tokens.stride(0), blocks, steps, ROWS=power_of_two(steps + 1),
            BLOCKS=power_of_two(blocks), num_warps=4,
        )  # fmt: skip
        if not by_temperature:
            return
        value, index = floats(requests, 2, blocks), integers(requests, 2, blocks)
        self.launch(
            verify.resample_kernel, (requests, blocks),
            logits, drafts, draft_probs, draft_to_target, draft_ids, temperature, seeds, starts, decided, top, whole,
            value, index, vocab, draft_vocab, logits.stride(0), drafts.stride(0), *prob_strides, blocks, steps,
            COLUMNS=_COLUMNS, num_warps=8,
        )  # fmt: skip
        self.launch(
            verify.write_own_kernel, (requests,),
            value, index, decided, tokens, tokens.stride(0), blocks, BLOCKS=power_of_two(blocks), num_warps=1,
        )  # fmt: skip


def require_rows(sampled: Sampled) -> None:
    """Raise ValueError where num_sampled, or a row of token_ids, is not contiguous: kernels cannot write it."""
    if sampled.token_ids.stride(1) != 1 or not sampled.num_sampled.is_contiguous():
        raise ValueError("num_sampled, and the rows of sampled token_ids, must be contiguous")
