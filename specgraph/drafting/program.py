"""Draft programs: plain tensor code for one propose, written once for every lowering.

A program knows no device, no graph and no lowering. It reads and writes the persistent buffers, so a step that is
captured once and replayed, a step inside one merged graph, and an eager step run the very same ops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from specgraph import kernels
from specgraph.attention import AttentionBackend
from specgraph.drafting.buffers import DraftBuffers
from specgraph.drafting.config import DraftConfig
from specgraph.graphs import MakeAttend
from specgraph.models.protocol import DraftHead, GreedyHead


class DraftProgram(Protocol):
    """How one propose is computed. `buffers` are sliced to the padded batch."""

    @property
    def num_steps(self) -> int:
        """Passes of a propose: K for a chain, 1 for a parallel drafter."""
        ...

    def first(self, buffers: DraftBuffers, make_attend: MakeAttend) -> None:
        """Step 0: from the target's round to the first draft token, over K + 1 rows a request."""
        ...

    def step(self, buffers: DraftBuffers, make_attend: MakeAttend, step: int) -> None:
        """A later step, over one row a request. `step` is for `make_attend` only: captured once, it is stale."""
        ...


@dataclass(frozen=True, slots=True)
class ChainProgram:
    """EAGLE-style autoregressive drafting: each step takes the token and the hidden state of the one before."""

    head: DraftHead
    attention: AttentionBackend
    config: DraftConfig

    @property
    def num_steps(self) -> int:
        """K."""
        return self.config.num_speculative_tokens

    def first(self, buffers: DraftBuffers, make_attend: MakeAttend) -> None:
        """See `DraftProgram.first`."""
        kernels.begin_propose(
            buffers.sampled_token_ids,
            buffers.num_sampled,
            buffers.start_positions,
            buffers.block_table,
            max_model_len=self.config.max_model_len,
            block_size=self.config.block_size,
            token_ids=buffers.token_ids,
            positions=buffers.first.positions,
            slot_mapping=buffers.first.slot_mapping,
            seq_lens=buffers.first.seq_lens,
            last_rows=buffers.last_rows,
            step_positions=buffers.step.positions,
            step_seq_lens=buffers.step.seq_lens,
            draft_step=buffers.draft_step,
        )
        hidden = self.head.combine(buffers.aux_hidden)
        out = self.head.forward(buffers.token_ids, hidden, make_attend(buffers.first, 0), buffers.last_rows)
        kernels.take_rows(out.carry, None, buffers.hidden)
        self._sample(buffers, out.hidden)

    def step(self, buffers: DraftBuffers, make_attend: MakeAttend, step: int) -> None:
        """See `DraftProgram.step`."""
        self.attention.advance(buffers.step, buffers.draft_step, self.config.max_model_len, self.config.block_size)
        out = self.head.forward(buffers.step_token_ids, buffers.hidden, make_attend(buffers.step, step))
        kernels.take_rows(out.carry, None, buffers.hidden)
        self._sample(buffers, out.hidden)

    def _sample(self, buffers: DraftBuffers, hidden: Tensor) -> None:
        if buffers.draft_probs is None and isinstance(self.head, GreedyHead):
            self.head.draft_greedy(hidden, buffers.draft_step, buffers.step_token_ids, buffers.draft_token_ids)
            return
        logits = self.head.logits(hidden)
        if buffers.draft_probs is None:
            kernels.draft_greedy(
                logits,
                self.head.draft_to_target,
                buffers.draft_step,
                buffers.step_token_ids,
                buffers.draft_token_ids,
            )
        else:
            kernels.draft_gumbel(
                logits,
                self.head.draft_to_target,
                buffers.temperature,
                buffers.seeds,
                buffers.step.seq_lens,
                buffers.draft_step,
                buffers.step_token_ids,
                buffers.draft_token_ids,
                buffers.draft_probs,
            )
