"""Draft programs: plain tensor code for one propose, written once for every lowering.

A program knows no device, no graph and no lowering. It reads and writes the persistent buffers, so a step that is
captured once and replayed, a step inside one merged graph, and an eager step run the very same ops.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from specgraph import kernels
from specgraph.attention import AttentionMetadata, HostLengths
from specgraph.drafting.buffers import DraftBuffers, PassRows
from specgraph.drafting.host_lengths import HostRound
from specgraph.graphs import MakeAttend
from specgraph.models.protocol import DraftHead, ProjectionHead


class DraftProgram(Protocol):
    """How one propose is computed. `buffers` are sliced to the padded batch, its rows and its K."""

    @property
    def steps_differ(self) -> bool:
        """Whether each later step is a computation of its own. If not, one captured step is replayed for all."""
        ...

    @property
    def prefill_steps(self) -> int:
        """Passes with attention in a prefill: the modules that a prompt runs through."""
        ...

    def num_steps(self, num_speculative_tokens: int) -> int:
        """Passes of a propose of K tokens: K for a chain, 1 for a parallel drafter."""
        ...

    def rows(self, query_len: int, num_speculative_tokens: int) -> PassRows:
        """Rows a request after a target round of `query_len` rows."""
        ...

    def first(self, buffers: DraftBuffers, make_attend: MakeAttend) -> None:
        """Step 0: from the target's round to the first draft token (or to all of them)."""
        ...

    def step(self, buffers: DraftBuffers, make_attend: MakeAttend, step: int) -> None:
        """A later step. Unless `steps_differ`, `step` is for `make_attend` only: captured once, it is stale."""
        ...

    def prefill(
        self,
        token_ids: Tensor,
        aux_hidden: Tensor,
        metadata: AttentionMetadata,
        make_attend: MakeAttend,
        last_row: Tensor | None,
    ) -> None:
        """Write the drafter's KV of T prompt rows; drafts nothing.

        Args:
            token_ids: int64 [T], the token after each row's position.
            aux_hidden: [T, aux_size], the target's hidden states of the rows.
            metadata: T rows.
            last_row: int64 [1], the last real row where the rest is padding; None where every row is real.
        """
        ...

    def host_lengths(self, step: int, host_round: HostRound) -> HostLengths:
        """The same numbers as the device metadata has at `step`."""
        ...


def draft_one(head: DraftHead, buffers: DraftBuffers, hidden: Tensor) -> None:
    """Pick one token per request from hidden states [R, hidden_size], and write it to column `draft_step`."""
    picks = (buffers.draft_step, buffers.step_token_ids, buffers.draft_token_ids)
    draws = (buffers.temperature, buffers.seeds, buffers.step.seq_lens)
    if isinstance(head, ProjectionHead):
        out = head.output_projection
        logits = (hidden, out.norm, out.eps, out.weight, head.draft_to_target)
        if buffers.draft_probs is None:
            kernels.greedy_head(*logits, *picks)
        else:
            kernels.gumbel_head(*logits, *draws, *picks, buffers.draft_probs)
    elif buffers.draft_probs is None:
        kernels.draft_greedy(head.logits(hidden), head.draft_to_target, *picks)
    else:
        kernels.draft_gumbel(head.logits(hidden), head.draft_to_target, *draws, *picks, buffers.draft_probs)


def begin_rows(buffers: DraftBuffers, max_model_len: int, block_size: int, position_offset: int = 0) -> None:
    """Step 0's rows, and the later steps' starting metadata, from the target's round.

    `position_offset`: how much further than the target's the rows stand (`OffsetHead`).
    """
    kernels.begin_propose(
        buffers.sampled_token_ids,
        buffers.num_sampled,
        buffers.start_positions + position_offset if position_offset else buffers.start_positions,
        buffers.block_table,
        max_model_len=max_model_len,
        block_size=block_size,
        token_ids=buffers.token_ids,
        positions=buffers.first.positions,
        slot_mapping=buffers.first.slot_mapping,
        seq_lens=buffers.first.seq_lens,
        last_rows=buffers.last_rows,
        step_positions=buffers.step.positions,
        step_seq_lens=buffers.step.seq_lens,
        draft_step=buffers.draft_step,
    )
