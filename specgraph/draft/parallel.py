"""The parallel program: one pass fills a whole block of draft tokens (DFlash)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, TypeVar

from torch import Tensor

from specgraph.attention import AttentionMetadata
from specgraph.attention.context_parallel import rows_of_rank
from specgraph.attention.rows import BlockRows
from specgraph.buffers import Axes
from specgraph.capture import AttentionStack, MakeAttend
from specgraph.config import DraftConfig
from specgraph.draft.buffers import Allocation, OnePassBuffers, PassRows, PromptRows, pass_fields
from specgraph.draft.head_checks import HeadCheck
from specgraph.draft.kind import Kind
from specgraph.draft.program import DraftProgram, draft_block, make_seeds
from specgraph.draft.protocol import ParallelHead
from specgraph.errors import ConfigError

ParallelT = TypeVar("ParallelT", bound=ParallelHead, covariant=True)


@dataclass(frozen=True, kw_only=True)
class ParallelBuffers(OnePassBuffers):
    """The tensors of a block and of its context."""

    plan: BlockRows
    context: Annotated[AttentionMetadata, Axes("context")]
    """Positions and slots of the rows of the target's pass. Its sequence lengths are not used."""


class ParallelProgram(DraftProgram[ParallelT, ParallelBuffers]):
    """The target's hidden states become keys and values of the context. Then a block of masked rows runs without a
    causal mask.

    Every request, padding included, has the same number of rows in its block: 1 + K or K.
    """

    def allocate(self, new: Allocation) -> ParallelBuffers:
        return ParallelBuffers(**pass_fields(new), context=new.metadata("context"))

    @property
    def prefill_passes(self) -> int:
        """0: a prompt's context is stored without attention."""
        return 0

    @property
    def has_row_of_last_draft(self) -> bool:
        return not self.head.sample_from_anchor

    def rows(self, query_len: int, num_speculative_tokens: int) -> PassRows:
        """Return the rows of the target's pass as context, and a block of 1 + K rows. The block has K rows if the
        anchor's row predicts too."""
        block = max(1, num_speculative_tokens + self.has_row_of_last_draft)
        plan = BlockRows.of(block, self.config.limits, filler=self.head.mask_token_id)
        return PassRows(plan, {"context": query_len, "block": block})

    def first(self, b: ParallelBuffers, make_attend: MakeAttend) -> None:
        context = b.context.positions, b.context.slot_mapping
        b.plan.fill(b.accepted, b.step.places, b.step_token_ids, context)
        make_seeds(b)
        self.head.store_context(self.head.combine(b.inputs.aux_hidden), self.stack.store(b.context))
        token_ids = b.step_token_ids.view(b.inputs.num_sampled.shape[0], -1)
        hidden = self.head.forward(token_ids, make_attend(b.step, 0))
        blocks = hidden.view(*token_ids.shape, hidden.shape[-1])
        self._draft(b, blocks, blocks if self.head.sample_from_anchor else blocks[:, 1:])

    def _draft(self, b: ParallelBuffers, blocks: Tensor, hidden: Tensor) -> None:
        """Draft K tokens per request.

        Args:
            blocks: [R, n, hidden_size]: all rows of the blocks.
            hidden: [R, K, hidden_size]: the rows that predict a token.
        """
        draft_block(self.head, b, hidden.flatten(0, 1), self.tree)

    def prefill(self, rows: PromptRows, make_attend: MakeAttend) -> None:
        """See `DraftProgram.prefill`. The context is made from hidden states alone; tokens are not read.

        No row depends on another one. If ranks share out the keys, each rank computes only the rows of its own keys.
        """
        hidden, metadata = rows.aux_hidden, rows.metadata
        one_prompt = rows.last_row is not None and metadata.seq_lens.shape[0] == 1  # its positions are consecutive
        ranks = next((layer.ranks for layer in self.stack.layers), None) if one_prompt else None
        if (own := rows_of_rank(metadata.positions, ranks)) is not None:
            places = {name: getattr(metadata, name)[own] for name in ("positions", "slot_mapping")}
            hidden, metadata = hidden[own], replace(metadata, **places)
        self.head.store_context(self.head.combine(hidden), self.stack.store(metadata))


class ParallelKind(Kind[Any]):
    """See `ParallelHead`."""

    protocol: ClassVar[type[Any]] = ParallelHead
    chains = ParallelProgram
    trees = ParallelProgram
    is_one_pass = True

    def check_limits(self, head: ParallelHead, config: DraftConfig, stack: AttentionStack) -> None:
        super().check_limits(head, config, stack)
        if config.num_speculative_tokens > head.max_speculative_tokens:
            raise ConfigError(
                f"num_speculative_tokens is {config.num_speculative_tokens}, and this parallel drafter was trained to "
                f"fill {head.max_speculative_tokens} masked positions; ask for at most that many"
            )

    def check(self, check: HeadCheck) -> None:
        ids, context = check.inputs()
        check.call("store_context", context, check.store)
        hidden = check.forward(ids[None], check.attend)
        check.expect("forward(...)", hidden, check.rows, check.head.hidden_size, dtype=check.head.dtype)
        self.check_draws(check, hidden, ids)
        check.logits()

    def check_draws(self, check: HeadCheck, hidden: Tensor, ids: Tensor) -> None:
        """Check the methods besides `logits` that drafting from a block calls."""
