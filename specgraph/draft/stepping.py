"""The base of draft programs of several draft steps: buffers, and hidden states handed from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar

import torch
from torch import Tensor

from specgraph import ops
from specgraph.attention import AttentionMetadata
from specgraph.attention.rows import Reached, VerifiedRows
from specgraph.buffers import Axes, Once, PerRequest
from specgraph.capture import MakeAttend
from specgraph.draft.buffers import Allocation, DraftBuffers, PromptRows
from specgraph.draft.program import DraftProgram, draw, make_seeds
from specgraph.draft.protocol import DraftHead, DraftOutput


@dataclass(frozen=True, kw_only=True)
class StepBuffers(DraftBuffers):
    """The tensors of programs of several draft steps."""

    token_ids: Annotated[Tensor, Axes("first")]
    """int64 [R * first rows]: the input tokens of draft step 0."""
    last_rows: PerRequest
    """int64 [R]: the row of each request's last accepted token."""
    first: Annotated[AttentionMetadata, Axes("first")]
    """Metadata of draft step 0: the rows of the target's pass, and past rows if the program has any."""
    step: Annotated[AttentionMetadata, Axes("later")]
    """Metadata of the later draft steps. Its rows move on from step to step, in place."""
    step_token_ids: Annotated[Tensor, Axes("later")]
    """int64 [R * later rows]: the latest draft tokens, which are the input of the next draft step."""
    hidden: Annotated[Tensor, Axes("carried")]
    """[R * carried rows, hidden_size]: the hidden states that one draft step leaves for the next."""
    draft_step: Once
    """int64 [1]: the next column of `draft_token_ids` to write, counted on the device."""

    @property
    def reached(self) -> Reached:
        """The tensors that draft step 0 fills for the later steps: last rows, positions, lengths and the column."""
        return Reached(self.last_rows, self.step.positions, self.step.seq_lens, self.draft_step)


@dataclass(frozen=True, kw_only=True)
class ChainBuffers(StepBuffers):
    """The tensors of programs without past rows: draft step 0 takes exactly the rows of the target's pass."""

    plan: VerifiedRows


HeadT = TypeVar("HeadT", bound=DraftHead, covariant=True)
StepBuffersT = TypeVar("StepBuffersT", bound=StepBuffers)


class SteppingProgram(DraftProgram[HeadT, StepBuffersT]):
    """A program of several draft steps: each takes the hidden states of the one before."""

    def step(self, b: StepBuffersT, make_attend: MakeAttend, step: int) -> Tensor | None:
        """Run a draft step after step 0.

        If `step_kind` is "alike", one captured step is replayed for all later ones. `step` may then be given to
        `make_attend` only; the number that changes from replay to replay is `b.draft_step`.

        Returns:
            The hidden states for the next draft step, as `first` does. If the next step is in the same launch, it takes
            this tensor as `b.hidden`. Otherwise the tensor is copied to `b.hidden`. None if `b.hidden` already has
            them.
        """
        raise AssertionError(f"{type(self).__name__} has no step {step}")

    def run(self, b: StepBuffersT, steps: Sequence[int], make_attend: MakeAttend) -> None:
        carried: Tensor | None = None
        for step in steps:
            now = b if carried is None else replace(b, hidden=carried)
            carried = self.first(now, make_attend) if step == 0 else self.step(now, make_attend, step)
        if carried is not None:
            ops.take_rows(carried, None, b.hidden)

    def prefill(self, rows: PromptRows, make_attend: MakeAttend) -> None:
        prefill_rows(self.head, rows, make_attend)

    def make_inert(self) -> None:
        """Make every request inert, in the later draft steps too."""
        super().make_inert()
        self.buffers.step.seq_lens.zero_()


def step_fields(new: Allocation, tree_keys: int = 0) -> dict[str, Any]:
    """Return the fields of `StepBuffers`, as arguments of a subclass."""
    return new.common() | {
        "token_ids": new.rows("first"),
        "last_rows": new.zeros(new.requests),
        "first": new.metadata("first"),
        "step": new.metadata("later", tree_keys),
        "step_token_ids": new.rows("later"),
        "hidden": new.hidden("carried"),
        "draft_step": new.zeros(1),
    }


def forward_first(head: DraftHead, b: ChainBuffers, make_attend: MakeAttend) -> DraftOutput:
    """Run draft step 0 over the rows of the target's pass. Returns the output of each request's last accepted row."""
    b.plan.fill(b.accepted, b.first.places, b.token_ids, b.reached)
    make_seeds(b)
    hidden = head.combine(b.inputs.aux_hidden)
    return head.forward(b.token_ids, hidden, make_attend(b.first, 0), b.last_rows)


def prefill_rows(head: DraftHead, rows: PromptRows, make_attend: MakeAttend) -> None:
    """Write the keys and values of prompt rows with one pass of a head."""
    head.forward(rows.token_ids, head.combine(rows.aux_hidden), make_attend(rows.metadata, 0), rows.last_row)


def draft_one(head: DraftHead, b: StepBuffers, hidden: Tensor) -> None:
    """Draw one token per request from hidden states [R, hidden_size], and write it to column `draft_step`."""
    drafts = ops.Drafts(b.draft_token_ids, head.draft_to_target, b.draft_step, b.step_token_ids)
    drafted = None
    if b.sampling is not None:
        column = torch.arange(b.draft_token_ids.shape[1], device=hidden.device)
        drafted = torch.where(column < b.draft_step, b.draft_token_ids, -1)
    draw(head, b, hidden, drafts, (b.step.seq_lens, None), drafted)
