"""Launching the Triton kernels that pick draft tokens from logits."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specgraph.ops.triton import sampling
from specgraph.ops.triton.launch import Launcher, ceil_div, contiguous_rows, power_of_two

_COLUMNS = 4096
"""Columns of stored logits per program."""
_PROBS_COLUMNS = 2048
"""Columns of a distribution per program."""


class Draws(NamedTuple):
    """What sampling takes beside logits: the noise of a row is that of its seed and position."""

    temperature: Tensor
    """float32 [R]"""
    seeds: Tensor
    """int64 [R]"""
    positions: Tensor
    """int32 or int64 [R]: one less than the position of the first token drawn."""
    more_positions: Tensor | None = None
    """int32 [R], added to `positions`."""


class Picked(NamedTuple):
    """The best token of each block of columns, and the parts of each block's softmax where tokens are sampled."""

    value: Tensor
    """float32 [rows, blocks]"""
    index: Tensor
    """int32 [rows, blocks]: the column of `value`."""
    logits: Tensor | None
    """[rows, vocab]"""
    top: Tensor | None
    """float32 [rows, blocks]: the largest logit / temperature."""
    total: Tensor | None
    """float32 [rows, blocks]: the sum of exp(logit / temperature - top)."""

    @property
    def blocks(self) -> int:
        """Blocks of columns."""
        return self.value.shape[1]


def allocate_picked(like: Tensor, blocks: int, logits: Tensor | None) -> Picked:
    """For the rows of `like`, with the softmax's parts if there are logits."""
    shape = like.shape[0], blocks

    def floats() -> Tensor:
        return like.new_empty(shape, dtype=torch.float32)

    top, total = (None, None) if logits is None else (floats(), floats())
    return Picked(floats(), like.new_empty(shape, dtype=torch.int32), logits, top, total)


@dataclass(frozen=True, slots=True)
class SamplingOps(Launcher):
    """Implementations of the ops in `specgraph.ops.draft_sampling`."""

    def draft_greedy(
        self, logits: Tensor, draft_to_target: Tensor | None, draft_step: Tensor, token_ids: Tensor,
        draft_token_ids: Tensor,
    ) -> None:  # fmt: skip
        """See `specgraph.ops.draft_greedy`."""
        self.finish_greedy(self.pick(logits, None), draft_to_target, draft_step, token_ids, draft_token_ids)

    def draft_gumbel(
        self, logits: Tensor, draft_to_target: Tensor | None, temperature: Tensor, seeds: Tensor, seq_lens: Tensor,
        draft_step: Tensor, token_ids: Tensor, draft_token_ids: Tensor, draft_probs: Tensor,
    ) -> None:  # fmt: skip
        """See `specgraph.ops.draft_gumbel`."""
        picked = self.pick(logits, Draws(temperature, seeds, seq_lens))
        self.finish_sampled(picked, draft_to_target, temperature, draft_step, token_ids, draft_token_ids, draft_probs)

    def draft_block_greedy(self, logits: Tensor, draft_to_target: Tensor | None, draft_token_ids: Tensor) -> None:
        """See `specgraph.ops.draft_block_greedy`."""
        self.finish_greedy(self.pick(logits, None), draft_to_target, None, None, draft_token_ids)

    def draft_block_gumbel(
        self, logits: Tensor, draft_to_target: Tensor | None, temperature: Tensor, seeds: Tensor,
        start_positions: Tensor, num_sampled: Tensor, draft_token_ids: Tensor, draft_probs: Tensor,
    ) -> None:  # fmt: skip
        """See `specgraph.ops.draft_block_gumbel`."""
        draws = Draws(temperature, seeds, start_positions, num_sampled)
        picked = self.pick(logits, draws, draft_token_ids.shape[1])
        self.finish_sampled(picked, draft_to_target, temperature, None, None, draft_token_ids, draft_probs)

    def pick(self, logits: Tensor, draws: Draws | None, steps: int = 1) -> Picked:
        """The best token of each 4096 columns of stored logits, `steps` rows per request."""
        logits = contiguous_rows(logits)
        count, vocab = logits.shape
        picked = allocate_picked(logits, ceil_div(vocab, _COLUMNS), None if draws is None else logits)
        sampling.pick_kernel[(picked.blocks, count)](
            logits, picked.value, picked.index, picked.top, picked.total, *(draws or (None,) * 4), vocab,
            logits.stride(0), picked.blocks, steps, SAMPLED=draws is not None, COLUMNS=_COLUMNS, num_warps=8,
            **self.common(),
        )  # fmt: skip
        return picked

    def finish_greedy(
        self, picked: Picked, draft_to_target: Tensor | None, draft_step: Tensor | None, token_ids: Tensor | None,
        draft_token_ids: Tensor,
    ) -> None:  # fmt: skip
        """Write the best token of each row; see `sampling.write_token`."""
        require_rows(token_ids, draft_token_ids)
        sampling.finish_greedy_kernel[(picked.value.shape[0],)](
            picked.value, picked.index, draft_to_target, draft_step, token_ids, draft_token_ids, picked.blocks,
            1 if draft_step is not None else draft_token_ids.shape[1], draft_token_ids.stride(0),
            BLOCKS=power_of_two(picked.blocks), num_warps=4, **self.common(),
        )  # fmt: skip

    def finish_sampled(
        self, picked: Picked, draft_to_target: Tensor | None, temperature: Tensor, draft_step: Tensor | None,
        token_ids: Tensor | None, draft_token_ids: Tensor, draft_probs: Tensor,
    ) -> None:  # fmt: skip
        """Write the sampled token of each row, and its distribution."""
        require_rows(token_ids, draft_token_ids, draft_probs)
        count, vocab = picked.logits.shape
        sampling.finish_sampled_kernel[(count, ceil_div(vocab, _PROBS_COLUMNS))](
            picked.logits, picked.value, picked.index, picked.top, picked.total, draft_to_target, temperature,
            draft_step, token_ids, draft_token_ids, draft_probs, picked.blocks, vocab, picked.logits.stride(0),
            1 if draft_step is not None else draft_token_ids.shape[1], draft_token_ids.stride(0),
            draft_probs.stride(0), draft_probs.stride(1), BLOCKS=power_of_two(picked.blocks),
            COLUMNS=_PROBS_COLUMNS, num_warps=8, **self.common(),
        )  # fmt: skip


def require_rows(token_ids: Tensor | None, *written: Tensor) -> None:
    """Refuse result tensors that the kernels cannot write.

    Raises:
        ValueError: token_ids, or a row of another tensor, is not contiguous.
    """
    if (token_ids is not None and not token_ids.is_contiguous()) or any(t.stride(-1) != 1 for t in written):
        raise ValueError("token_ids, and the rows of draft_token_ids and draft_probs, must be contiguous")
