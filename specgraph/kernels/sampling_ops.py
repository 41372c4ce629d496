"""Launching the Triton kernels that pick draft tokens from logits."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specgraph.kernels import linear, sampling
from specgraph.kernels.launch import ceil_div, contiguous_rows, power_of_two
from specgraph.kernels.linear_ops import LinearOps
from specgraph.ops.draft_sampling import Drafts, Draws, LmHead
from specgraph.ops.linear import Norm, Weight

MAX_SAMPLED_ROWS = 32
"""Above this many rows the noise is drawn in a kernel of its own: the linear has too few threads for so much of it."""

_COLUMNS = 4096
"""Columns of stored logits, or of a distribution, per program."""


class Picked(NamedTuple):
    """The best token of each block of columns, and the parts of each block's softmax where tokens are sampled."""

    value: Tensor
    """float32 [rows, blocks]"""
    index: Tensor
    """int32 [rows, blocks]: the column of `value`."""
    logits: Tensor | None = None
    """[rows, vocab]"""
    top: Tensor | None = None
    """float32 [rows, blocks]: the largest logit / temperature."""
    total: Tensor | None = None
    """float32 [rows, blocks]: the sum of exp(logit / temperature - top)."""

    @property
    def blocks(self) -> int:
        """Blocks of columns."""
        return self.value.shape[1]


def _allocate_picked(like: Tensor, blocks: int, logits: Tensor | None) -> Picked:
    """Allocate for the rows of `like`, with the softmax's parts if there are logits."""
    shape = like.shape[0], blocks

    def floats() -> Tensor:
        return like.new_empty(shape, dtype=torch.float32)

    top, total = (None, None) if logits is None else (floats(), floats())
    return Picked(floats(), like.new_empty(shape, dtype=torch.int32), logits, top, total)


class SamplingOps(LinearOps):
    """Implementations of the ops in `specgraph.ops.draft_sampling`."""

    __slots__ = ()

    def draft_from_logits(self, logits: Tensor, drafts: Drafts, draws: Draws | None = None) -> None:
        self._finish(self._pick(logits, draws, drafts.rows), drafts, draws)

    def draft_from_hidden(self, x: Tensor, head: LmHead, drafts: Drafts, draws: Draws | None = None) -> None:
        if draws is not None and drafts.rows > 1:
            norm = None if head.norm is None else Norm(head.norm, head.eps)
            logits = self.norm_linear(head.taken(x), norm, Weight(head.weight), head.added)
            picked = self._pick(logits, draws, drafts.rows)
        else:
            picked = self.best_by_block(x, head, draws)
        self._finish(picked, drafts, draws)

    def best_by_block(
        self, x: Tensor, head: LmHead, draws: Draws | None, step: tuple[Tensor | None, Tensor | None] = (None, None)
    ) -> Picked:
        """Return the best token of each block of columns of rms_norm(x) @ weight.T, one row per request with `draws`.

        step: `draft_step`, and int64 [1] that its value is copied to where a tile computes the product.
        """
        _, _, weight, added, row_ids, turn = head
        x = self._normed(x, None if head.norm is None else Norm(head.norm, head.eps))
        few, own = self.options.few_rows, self._own(x, None)
        if added is not None or row_ids is not None:
            few = own = None
        if few is not None and draws is None and (found := few.best(x, weight, *step)) is not None:
            return Picked(*found)
        if own is not None and draws is None and (found := own.best(x, weight, *step)) is not None:
            return Picked(*found)
        rows = x if row_ids is None else x[:1].expand(row_ids.shape[0], -1)
        tile = self._tile("head", rows, weight, weight.shape[0])
        if tile is None:
            return self._pick(head._replace(norm=None).logits(x), draws)
        if draws is not None and rows.shape[0] > MAX_SAMPLED_ROWS:
            return self._pick(self._linear(head.taken(x), weight, None, added, tile), draws)
        count, columns = rows.shape[0], weight.shape[0]
        added = None if added is None else contiguous_rows(added)
        logits = None if draws is None else x.new_empty(count, columns)
        picked = _allocate_picked(rows, ceil_div(columns, tile.columns), logits)
        noise = (None, None, None, None) if draws is None else draws[:4]
        strides = (0 if tensor is None else tensor.stride(0) for tensor in (added, row_ids))
        self.launch(
            linear.head_kernel, (picked.blocks,),
            x, weight, added, row_ids, logits, picked.value, picked.index, picked.top, picked.total, *noise, *step,
            count, columns, weight.shape[1], x.stride(0), *strides, picked.blocks, None if turn is None else turn % 2,
            **self._shape(tile, rows, picked.blocks),
        )  # fmt: skip
        return picked

    def _pick(self, logits: Tensor, draws: Draws | None, rows: int = 1) -> Picked:
        """Return the best token of each 4096 columns of stored logits, with that many rows per request."""
        logits = contiguous_rows(logits)
        count, vocab = logits.shape
        picked = _allocate_picked(logits, ceil_div(vocab, _COLUMNS), None if draws is None else logits)
        noise = (None,) * 4 if draws is None else draws[:4]
        self.launch(
            sampling.pick_kernel, (count, picked.blocks),
            logits, picked.value, picked.index, picked.top, picked.total, *noise, vocab, logits.stride(0),
            picked.blocks, rows, COLUMNS=_COLUMNS, num_warps=8,
        )  # fmt: skip
        return picked

    def _finish(self, picked: Picked, drafts: Drafts, draws: Draws | None) -> None:
        """Write the token of each row (see `sampling.write_token`) and its distribution."""
        draft_token_ids, draft_to_target, draft_step, token_ids = drafts
        require_rows(drafts, *(() if draws is None else (draws.draft_probs,)))
        blocks: dict[str, int] = {"BLOCKS": power_of_two(picked.blocks)}
        if draws is None:
            self.launch(
                sampling.finish_greedy_kernel, (picked.value.shape[0],),
                picked.value, picked.index, draft_to_target, draft_step, token_ids, draft_token_ids, picked.blocks,
                drafts.rows, draft_token_ids.stride(0), num_warps=4, **blocks,
            )  # fmt: skip
            return
        (count, vocab), probs = picked.logits.shape, draws.draft_probs
        self.launch(
            sampling.finish_sampled_kernel, (count, ceil_div(vocab, _COLUMNS)),
            picked.logits, picked.value, picked.index, picked.top, picked.total, draft_to_target, draws.temperature,
            draft_step, token_ids, draft_token_ids, probs, picked.blocks, vocab, picked.logits.stride(0), drafts.rows,
            draft_token_ids.stride(0), probs.stride(0), probs.stride(1), COLUMNS=_COLUMNS, num_warps=8, **blocks,
        )  # fmt: skip


def require_rows(drafts: Drafts, *written: Tensor) -> None:
    """Raise ValueError where token_ids, or a row of another result, is not contiguous: kernels cannot write it."""
    ids, rows = drafts.token_ids, (drafts.draft_token_ids, *written)
    if (ids is not None and not ids.is_contiguous()) or any(t.stride(-1) != 1 for t in rows):
        raise ValueError("token_ids, and the rows of draft_token_ids and draft_probs, must be contiguous")
