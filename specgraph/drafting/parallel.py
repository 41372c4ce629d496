"""The parallel program (DFlash): all K tokens from one pass over a block of masked rows, attention not causal."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specgraph import kernels
from specgraph.attention import AttentionMetadata, HostLengths
from specgraph.drafting.buffers import DraftBuffers, PassRows
from specgraph.drafting.config import DraftConfig
from specgraph.drafting.host_lengths import HostRound
from specgraph.graphs import AttentionStack, MakeAttend
from specgraph.models.protocol import ParallelHead


@dataclass(frozen=True, slots=True)
class ParallelProgram:
    """One step: the round's hidden states become context keys and values, then the block runs.

    Every request has 1 + K rows in the block, padded ones too, so the rows of a captured size are a multiple of 1 + K
    by construction.
    """

    head: ParallelHead
    stack: AttentionStack
    config: DraftConfig
    steps_differ: bool = False
    prefill_steps: int = 0

    def num_steps(self, num_speculative_tokens: int) -> int:
        """1."""
        return 1

    def rows(self, query_len: int, num_speculative_tokens: int) -> PassRows:
        """The round's rows are context; the block has 1 + K."""
        return PassRows(query_len, later=1 + num_speculative_tokens, carried=0)

    def first(self, buffers: DraftBuffers, make_attend: MakeAttend) -> None:
        """See `DraftProgram.first`."""
        kernels.begin_block(
            buffers.sampled_token_ids,
            buffers.num_sampled,
            buffers.start_positions,
            buffers.block_table,
            mask_token_id=self.head.mask_token_id,
            max_model_len=self.config.max_model_len,
            block_size=self.config.block_size,
            context_positions=buffers.first.positions,
            context_slots=buffers.first.slot_mapping,
            token_ids=buffers.step_token_ids,
            positions=buffers.step.positions,
            slot_mapping=buffers.step.slot_mapping,
            seq_lens=buffers.step.seq_lens,
        )
        self.head.store_context(self.head.combine(buffers.aux_hidden), self.stack.store(buffers.first))
        hidden = self.head.forward(buffers.step_token_ids, make_attend(buffers.step, 0))
        blocks = hidden.view(buffers.num_sampled.shape[0], -1, hidden.shape[-1])
        self._sample(buffers, blocks[:, 1:].flatten(0, 1))

    def step(self, buffers: DraftBuffers, make_attend: MakeAttend, step: int) -> None:
        """There is none."""
        raise AssertionError("a parallel drafter has one step")

    def prefill(
        self,
        token_ids: Tensor,
        aux_hidden: Tensor,
        metadata: AttentionMetadata,
        make_attend: MakeAttend,
        last_row: Tensor | None,
    ) -> None:
        """See `DraftProgram.prefill`. Context is made from hidden states alone: tokens are not read."""
        self.head.store_context(self.head.combine(aux_hidden), self.stack.store(metadata))

    def host_lengths(self, step: int, host_round: HostRound) -> HostLengths:
        """See `DraftProgram.host_lengths`. The block begins where the accepted rows end."""
        rows = 1 + host_round.num_speculative_tokens
        ends = [min(end + rows, self.config.max_model_len) for end in host_round.accepted_ends()]
        return host_round.lengths(rows, ends)

    def _sample(self, buffers: DraftBuffers, hidden: Tensor) -> None:
        logits = self.head.logits(hidden)
        if buffers.draft_probs is None:
            kernels.draft_block_greedy(logits, self.head.draft_to_target, buffers.draft_token_ids)
        else:
            kernels.draft_block_gumbel(
                logits,
                self.head.draft_to_target,
                buffers.temperature,
                buffers.seeds,
                buffers.start_positions,
                buffers.num_sampled,
                buffers.draft_token_ids,
                buffers.draft_probs,
            )
