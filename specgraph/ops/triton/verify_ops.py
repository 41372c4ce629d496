"""Launching the Triton kernels that accept draft tokens."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specgraph.ops.triton import verify
from specgraph.ops.triton.launch import Launcher, ceil_div, contiguous_rows, power_of_two

_COLUMNS = 4096
"""Columns of logits per program."""


class _Sampling(NamedTuple):
    """What sampled acceptance takes beside logits and draft tokens; see `specgraph.ops.verify_sampled`."""

    draft_probs: Tensor | None
    draft_to_target: Tensor | None
    temperature: Tensor


@dataclass(frozen=True, slots=True)
class VerifyOps(Launcher):
    """Implementations of the ops in `specgraph.ops.rejection`."""

    def verify_greedy(
        self, target_logits: Tensor, draft_token_ids: Tensor, start_positions: Tensor, sampled_token_ids: Tensor,
        num_sampled: Tensor,
    ) -> None:  # fmt: skip
        """See `specgraph.ops.verify_greedy`."""
        self._verify(target_logits, draft_token_ids, start_positions, None, None, None, sampled_token_ids, num_sampled)

    def verify_synthetic(
        self, target_logits: Tensor, draft_token_ids: Tensor, chances: Tensor, seeds: Tensor, start_positions: Tensor,
        sampled_token_ids: Tensor, num_sampled: Tensor,
    ) -> None:  # fmt: skip
        """See `specgraph.ops.verify_synthetic`."""
        self._verify(
            target_logits, draft_token_ids, start_positions, None, seeds, chances, sampled_token_ids, num_sampled
        )

    def verify_sampled(
        self, target_logits: Tensor, draft_token_ids: Tensor, draft_probs: Tensor | None,
        draft_to_target: Tensor | None, temperature: Tensor, seeds: Tensor, start_positions: Tensor,
        sampled_token_ids: Tensor, num_sampled: Tensor,
    ) -> None:  # fmt: skip
        """See `specgraph.ops.verify_sampled`."""
        if draft_probs is None:
            draft_to_target = None  # draft tokens are target ids, and nothing else of the drafter is read
        elif draft_probs.stride(-1) != 1:
            draft_probs = draft_probs.contiguous()
        sampling = _Sampling(draft_probs, draft_to_target, temperature)
        self._verify(
            target_logits, draft_token_ids, start_positions, sampling, seeds, None, sampled_token_ids, num_sampled
        )

    def _verify(
        self, logits: Tensor, drafts: Tensor, starts: Tensor, sampling: _Sampling | None, seeds: Tensor | None,
        chances: Tensor | None, sampled_token_ids: Tensor, num_sampled: Tensor,
    ) -> None:  # fmt: skip
        (requests, steps), (rows, vocab) = drafts.shape, logits.shape
        if requests == 0:
            return
        if sampled_token_ids.stride(1) != 1 or not num_sampled.is_contiguous():
            raise ValueError("num_sampled, and the rows of sampled_token_ids, must be contiguous")
        logits, drafts, starts = contiguous_rows(logits), contiguous_rows(drafts), starts.contiguous()
        blocks = ceil_div(vocab, _COLUMNS)

        def floats(*shape: int) -> Tensor:
            return logits.new_empty(shape, dtype=torch.float32)

        def integers(*shape: int) -> Tensor:
            return logits.new_empty(shape, dtype=torch.int32)

        value, index = floats(rows, blocks), integers(rows, blocks)
        draft_probs, draft_to_target, temperature = sampling or (None, None, None)
        total = decided = top = whole = draft_ids = None
        if sampling is not None:
            total, decided = floats(rows, blocks), integers(requests)
            top, whole = floats(requests), floats(requests)
        if draft_to_target is not None:
            draft_ids = integers(vocab)
        draft_vocab = 0 if draft_probs is None else draft_probs.shape[2]
        prob_strides = (0, 0) if draft_probs is None else (draft_probs.stride(0), draft_probs.stride(1))
        draft_stride, sampled_stride = drafts.stride(0), sampled_token_ids.stride(0)
        verify.scan_kernel[(blocks, rows)](
            logits, starts, temperature, draft_to_target, value, index, total, draft_ids, vocab, draft_vocab,
            logits.stride(0), blocks, steps + 1, SAMPLED=sampling is not None, COLUMNS=_COLUMNS, num_warps=8,
            **self.common(),
        )  # fmt: skip
        verify.decide_kernel[(requests,)](
            logits, drafts, draft_probs, draft_to_target, draft_ids, temperature, seeds, chances, starts, value, index,
            total, sampled_token_ids, num_sampled, decided, top, whole, draft_vocab, logits.stride(0), draft_stride,
            *prob_strides, sampled_stride, blocks, steps, SAMPLED=sampling is not None, ROWS=power_of_two(steps + 1),
            BLOCKS=power_of_two(blocks), num_warps=4, **self.common(),
        )  # fmt: skip
        if sampling is None:
            return
        value, index = floats(requests, 2, blocks), integers(requests, 2, blocks)
        verify.resample_kernel[(blocks, requests)](
            logits, drafts, draft_probs, draft_to_target, draft_ids, temperature, seeds, starts, decided, top, whole,
            value, index, vocab, draft_vocab, logits.stride(0), draft_stride, *prob_strides, blocks, steps,
            COLUMNS=_COLUMNS, num_warps=8, **self.common(),
        )  # fmt: skip
        verify.write_own_kernel[(requests,)](
            value, index, decided, sampled_token_ids, sampled_stride, blocks, BLOCKS=power_of_two(blocks),
            num_warps=1, **self.common(),
        )  # fmt: skip
