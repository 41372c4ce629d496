"""The inputs of the verify that follows a propose."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportReturnType=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.launch import Launcher, contiguous_rows, power_of_two


@triton.jit
def next_verify_kernel(
    sampled_token_ids, num_sampled, draft_token_ids, start_positions, last_token_ids, to_draft_token_ids, drafts,
    sampled_stride, draft_stride, WIDTH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program per request."""
    if OVERLAP is not None:
        OVERLAP()
    request = tl.program_id(0)
    count = tl.load(num_sampled + request)
    live = count > 0
    last = tl.load(sampled_token_ids + request * sampled_stride + tl.maximum(count - 1, 0), mask=live, other=0)
    start = tl.load(start_positions + request)
    tl.store(last_token_ids + request, last)
    tl.store(start_positions + request, tl.where(live, start + count, -1))
    offset = tl.arange(0, WIDTH)
    draft = tl.load(draft_token_ids + request * draft_stride + offset, mask=offset < drafts, other=0)
    tl.store(to_draft_token_ids + request * drafts + offset, draft, mask=offset < drafts)


class NextVerifyOps(Launcher):
    """The implementation of `specgraph_run.decoder.ops.next_verify`."""

    __slots__ = ()

    def next_verify(
        self, sampled_token_ids: Tensor, num_sampled: Tensor, draft_token_ids: Tensor, start_positions: Tensor,
        last_token_ids: Tensor, to_draft_token_ids: Tensor,
    ) -> None:  # fmt: skip
        if not all(t.is_contiguous() for t in (num_sampled, start_positions, last_token_ids, to_draft_token_ids)):
            return NotImplemented
        sampled_token_ids, draft_token_ids = contiguous_rows(sampled_token_ids), contiguous_rows(draft_token_ids)
        drafts = draft_token_ids.shape[1]
        self.launch(
            next_verify_kernel, (num_sampled.shape[0],),
            sampled_token_ids, num_sampled, draft_token_ids, start_positions, last_token_ids, to_draft_token_ids,
            drafts, sampled_token_ids.stride(0), draft_token_ids.stride(0), WIDTH=power_of_two(max(drafts, 1)),
            num_warps=1,
        )  # fmt: skip
