"""The program of masked rows: one causal pass drafts all K tokens (P-EAGLE)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from specgraph import ops
from specgraph.attention.rows import MaskedRows
from specgraph.buffers import Axes
from specgraph.capture import MakeAttend
from specgraph.draft.buffers import Allocation, OnePassBuffers, PassRows, PromptRows, pass_fields
from specgraph.draft.head_checks import HeadCheck
from specgraph.draft.kind import Kind
from specgraph.draft.program import DraftProgram, draft_block, make_seeds
from specgraph.draft.protocol import MaskedHead
from specgraph.draft.stepping import prefill_rows


@dataclass(frozen=True, kw_only=True)
class MaskedBuffers(OnePassBuffers):
    """The tensors of a pass with masked rows."""

    plan: MaskedRows
    hidden: Annotated[Tensor, Axes("block")]
    """[R * rows of the pass, hidden_size]: the hidden states that the rows take as input."""


class MaskedProgram(DraftProgram[MaskedHead, MaskedBuffers]):
    """A causal pass over query_len + K - 1 rows per request: the rows of the target's pass and K - 1 masked rows.

    The masked rows follow the last accepted one. Their keys lie in slots that the next propose overwrites.
    """

    def allocate(self, new: Allocation) -> MaskedBuffers:
        return MaskedBuffers(**pass_fields(new), hidden=new.hidden("block"))

    def rows(self, query_len: int, num_speculative_tokens: int) -> PassRows:
        """Return the rows of the one pass: K - 1 more than the target's pass has."""
        length = query_len + max(1, num_speculative_tokens) - 1
        later, filler = length - query_len, self.head.mask_token_id
        return PassRows(MaskedRows.of(length, self.config.limits, later, filler), {"block": length})

    def first(self, b: MaskedBuffers, make_attend: MakeAttend) -> None:
        drafts = b.draft_token_ids.numel() if self.tree is None else b.inputs.num_requests * self.tree.num_steps
        hidden_rows, draft_rows = (b.draft_token_ids.new_empty(n) for n in (b.step_token_ids.numel(), drafts))
        b.plan.fill(b.accepted, b.step.places, b.step_token_ids, hidden_rows, draft_rows)
        make_seeds(b)
        combined = torch.cat([self.head.combine(b.inputs.aux_hidden), self.head.mask_hidden[None]])
        ops.take_rows(combined, hidden_rows, b.hidden)
        out = self.head.forward(b.step_token_ids, b.hidden, make_attend(b.step, 0), draft_rows)
        draft_block(self.head, b, out.hidden, self.tree)

    def prefill(self, rows: PromptRows, make_attend: MakeAttend) -> None:
        prefill_rows(self.head, rows, make_attend)


class MaskedKind(Kind[MaskedHead]):
    """See `MaskedHead`."""

    protocol = MaskedHead
    chains = trees = MaskedProgram
    is_one_pass = True

    def check(self, check: HeadCheck) -> None:
        check.expect("mask_hidden", check.head.mask_hidden, check.head.hidden_size, dtype=check.head.dtype)
        check.chain()
