"""The rows of each kind of pass: a class per kind plans the rows and fills them.

`of` makes the plan from the numbers that differ between passes of the kind. `fill` fills the rows in the given tensors.
All kinds run one op, `begin_rows`, which has an argument for everything that any pass needs.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from specgraph import ops
from specgraph.ops.begin_rows import RowInputs, RowPlan, Rows
from specgraph.ops.past_rows import PastRows

Limits = tuple[int, int]
"""max_model_len and block_size."""


class Places(NamedTuple):
    """The output tensors that place the rows of R requests, L rows each, for attention."""

    positions: Tensor
    """int64 [R * L]"""
    slot_mapping: Tensor
    """int64 [R * L]"""
    seq_lens: Tensor
    """int32 [R]"""


class Accepted(NamedTuple):
    """The target's results for R requests after acceptance: the input of row plans. See `ProposeBatch`."""

    inputs: RowInputs
    """Start positions, block table, `num_sampled` and the sampled tokens."""
    rows_without_block: Tensor
    """int64 [1]: output. The number of rows without a block is added to it."""


class Reached(NamedTuple):
    """The output tensors that later draft steps start from, with one row per request."""

    last_rows: Tensor
    """int64 [R]: the row of the last sampled token."""
    step_positions: Tensor
    """int64 [R]"""
    step_seq_lens: Tensor
    """int32 [R]"""
    draft_step: Tensor
    """int64 [1]: set to 0."""


class VerifiedRows(RowPlan):
    """The rows of a draft step 0 that takes exactly the rows of the target's pass. Later draft steps may follow."""

    __slots__ = ()

    @classmethod
    def of(cls, rows: int, limits: Limits, rows_behind: int, position_offset: int) -> VerifiedRows:
        """Plan `rows` rows per request; other arguments as in `RowPlan`."""
        return cls(rows, *limits, rows_behind=rows_behind, slots_of_rejected=True, position_offset=position_offset)

    def fill(self, accepted: Accepted, at: Places, token_ids: Tensor, reached: Reached) -> None:
        """Fill the rows. token_ids: int64 [R * L], written."""
        counted = accepted.rows_without_block
        rows = Rows(**at._asdict(), **reached._asdict(), token_ids=token_ids, rows_without_block=counted)
        ops.begin_rows(accepted.inputs, self, rows)


class ModuleRows(RowPlan):
    """Past rows, if there are any, then the rows of the target's pass."""

    __slots__ = ()

    @classmethod
    def of(cls, rows: int, limits: Limits, past: int) -> ModuleRows:
        """Plan `rows` rows per request. The first `past` of them are past rows."""
        return cls(rows, *limits, past=past, slots_of_rejected=not past)

    def fill(
        self,
        accepted: Accepted,
        at: Places,
        token_ids: Tensor,
        reached: Reached,
        states: tuple[Tensor, Tensor],
        past: PastRows | None,
    ) -> None:
        """Fill the rows.

        Args:
            token_ids: int64 [R * L], written.
            states: the hidden states of the target's rows, [R * query_len, hidden_size], and of all rows,
                [R * L, hidden_size]. The latter are written if there are past rows.
            past: the kept tokens and hidden states of past rows. None if there are no past rows.
        """
        counted = accepted.rows_without_block
        rows = Rows(**at._asdict(), **reached._asdict(), token_ids=token_ids, rows_without_block=counted)
        if past is None:
            ops.begin_rows(accepted.inputs, self, rows)
        else:
            of_columns, of_rows = states
            ops.begin_rows(accepted.inputs._replace(hidden=of_columns), self, rows._replace(hidden=of_rows), past)


class MaskedRows(RowPlan):
    """The rows of the target's pass, then masked rows."""

    __slots__ = ()

    @classmethod
    def of(cls, rows: int, limits: Limits, masked: int, filler: int) -> MaskedRows:
        """Plan `rows` rows per request. The last `masked` of them have the token `filler`."""
        return cls(rows, *limits, rows_behind=masked, filler=filler)

    def fill(self, accepted: Accepted, at: Places, token_ids: Tensor, hidden_rows: Tensor, draft_rows: Tensor) -> None:
        """Fill the rows.

        Args:
            token_ids: int64 [R * L], written.
            hidden_rows: int64 [R * L], written: for each row the target's row that it takes the hidden state of; see
                `Rows.hidden_rows`.
            draft_rows: int64 [R * n], written: the rows that predict a token.
        """
        counted = accepted.rows_without_block
        rows = Rows(**at._asdict(), token_ids=token_ids, last_rows=draft_rows, rows_without_block=counted)
        ops.begin_rows(accepted.inputs, self, rows._replace(hidden_rows=hidden_rows))


class BlockRows(RowPlan):
    """A block of masked rows after the sampled tokens, and the positions and slots of its context."""

    __slots__ = ()

    @classmethod
    def of(cls, rows: int, limits: Limits, filler: int) -> BlockRows:
        """Plan a block of `rows` rows per request: the last sampled token, then `filler` in all other rows."""
        return cls(rows, *limits, after_sampled=True, rows_behind=rows, filler=filler)

    def fill(self, accepted: Accepted, at: Places, token_ids: Tensor, context: tuple[Tensor, Tensor]) -> None:
        """Fill the rows.

        Args:
            token_ids: int64 [R * L], written.
            context: positions and slots of the target's rows, int64 [R * query_len] each, written.
        """
        (positions, slots), counted = context, accepted.rows_without_block
        rows = Rows(**at._asdict(), token_ids=token_ids, context_positions=positions, rows_without_block=counted)
        ops.begin_rows(accepted.inputs, self, rows._replace(context_slots=slots))


class TextRows(RowPlan):
    """The rows that append sampled tokens to the requests' texts. Rejected tokens have no slot: they are left out."""

    __slots__ = ()

    @classmethod
    def of(cls, rows: int, limits: Limits, position_offset: int) -> TextRows:
        """Plan `rows` rows per request."""
        return cls(rows, *limits, position_offset=position_offset)

    def fill(self, accepted: Accepted, at: Places, token_ids: Tensor, lens: Tensor) -> None:
        """Fill the rows.

        Args:
            token_ids: int64 [R * L], written.
            lens: int32 [R], written: the number of tokens in each text, the new ones included.
        """
        counted = accepted.rows_without_block
        rows = Rows(**at._asdict(), token_ids=token_ids, step_seq_lens=lens, rows_without_block=counted)
        ops.begin_rows(accepted.inputs, self, rows)


class PrefillRows(RowPlan):
    """The rows of prompts. Their tokens are known, so only the places are filled."""

    __slots__ = ()

    @classmethod
    def of(cls, rows: int, limits: Limits) -> PrefillRows:
        """Plan `rows` rows per request, padding included."""
        return cls(rows, *limits)

    def fill(
        self,
        start_positions: Tensor,
        block_table: Tensor,
        counts: Tensor,
        at: Places,
        last_row: Tensor | None = None,
    ) -> None:
        """Fill the places of the rows.

        Args:
            start_positions: int64 [R]: the position of each first row.
            block_table: int32 [R, max_blocks]
            counts: int64 or int32 [R]: the number of real rows of each prompt.
            last_row: int64 [R], written: the last real row of each prompt.
        """
        ops.begin_rows(RowInputs(start_positions, block_table, counts), self, Rows(**at._asdict(), last_rows=last_row))
