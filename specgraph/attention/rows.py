"""The rows of each kind of pass: a maker per kind, with the tensors that its passes read and write.

All makers run one op, `begin_rows`, which has an argument for everything that any pass needs.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from specgraph import ops
from specgraph.ops.begin_rows import RowInputs, RowPlan, Rows
from specgraph.ops.past_rows import PastRows


class Places(NamedTuple):
    """The places of L rows of each of R requests, as attention reads them; written."""

    positions: Tensor
    """int64 [R * L]"""
    slot_mapping: Tensor
    """int64 [R * L]"""
    seq_lens: Tensor
    """int32 [R]"""


class Accepted(NamedTuple):
    """A round of R requests after acceptance, as a drafter takes it."""

    start_positions: Tensor
    """int64 [R]"""
    block_table: Tensor
    """int32 [R, max_blocks]"""
    num_sampled: Tensor
    """int32 [R]"""
    token_ids: Tensor
    """int64 [R, query_len]"""
    rows_without_block: Tensor
    """int64 [1], added to"""


class Reached(NamedTuple):
    """The place from which later steps with one row per request go on; written."""

    last_rows: Tensor
    """int64 [R]: the row of the last sampled token."""
    positions: Tensor
    """int64 [R]"""
    seq_lens: Tensor
    """int32 [R]"""
    draft_step: Tensor
    """int64 [1]: set to 0."""


def round_rows(plan: RowPlan, accepted: Accepted, at: Places, token_ids: Tensor, reached: Reached) -> None:
    """Fill the rows of a round, behind which later steps go on.

    Args:
        token_ids: int64 [R * L], written.
    """
    *given, counted = accepted
    ops.begin_rows(RowInputs(*given), plan, Rows(*at, token_ids, *reached, rows_without_block=counted))


def module_rows(
    plan: RowPlan,
    accepted: Accepted,
    at: Places,
    token_ids: Tensor,
    reached: Reached,
    states: tuple[Tensor, Tensor],
    past: PastRows,
) -> None:
    """Fill past rows, then those of a round.

    Args:
        token_ids: int64 [R * L], written.
        states: hidden states of the round's columns [R * query_len, hidden_size], and of the rows [R * L, hidden_size],
            which are written.
        past: the tokens and hidden states that were kept of the past rows.
    """
    *given, counted = accepted
    of_columns, of_rows = states
    rows = Rows(*at, token_ids, *reached, hidden=of_rows, rows_without_block=counted)
    ops.begin_rows(RowInputs(*given, hidden=of_columns), plan, rows, past)


def masked_rows(
    plan: RowPlan, accepted: Accepted, at: Places, token_ids: Tensor, hidden_rows: Tensor, draft_rows: Tensor
) -> None:
    """Fill the rows of a round, then masked ones.

    Args:
        token_ids: int64 [R * L], written.
        hidden_rows: int64 [R * L], written: the row of the round whose hidden state each takes; see `Rows.hidden_rows`.
        draft_rows: int64 [R * n], written: the rows that predict.
    """
    *given, counted = accepted
    rows = Rows(*at, token_ids, draft_rows, hidden_rows=hidden_rows, rows_without_block=counted)
    ops.begin_rows(RowInputs(*given), plan, rows)


def block_rows(
    plan: RowPlan, accepted: Accepted, at: Places, token_ids: Tensor, context: tuple[Tensor, Tensor]
) -> None:
    """Fill a block of masked rows behind the sampled tokens, and the places of the round as its context.

    Args:
        token_ids: int64 [R * L], written.
        context: positions and slots of the round's columns, int64 [R * query_len] each, written.
    """
    *given, counted = accepted
    positions, slots = context
    rows = Rows(*at, token_ids, context_positions=positions, context_slots=slots, rows_without_block=counted)
    ops.begin_rows(RowInputs(*given), plan, rows)


def text_rows(plan: RowPlan, accepted: Accepted, at: Places, token_ids: Tensor, lens: Tensor) -> None:
    """Fill the tokens of a round, which enter the requests' texts.

    Args:
        token_ids: int64 [R * L], written.
        lens: int32 [R], written: tokens of each text, those of the round included.
    """
    *given, counted = accepted
    ops.begin_rows(RowInputs(*given), plan, Rows(*at, token_ids, step_seq_lens=lens, rows_without_block=counted))


def verify_rows(
    plan: RowPlan, start_positions: Tensor, block_table: Tensor, tokens: tuple[Tensor, Tensor], at: Places,
    token_ids: Tensor,
) -> None:  # fmt: skip
    """Fill the last token of each request, then its drafts.

    Args:
        tokens: the last tokens int64 [R], and the drafts int64 [R, K].
        token_ids: int64 [R * L], written.
    """
    last, drafts = tokens
    given, rows = RowInputs(start_positions, block_table, None, last[:, None], drafts), Rows(*at, token_ids)
    ops.begin_rows(given, plan, rows)


def tree_rows(
    plan: RowPlan, start_positions: Tensor, block_table: Tensor, tokens: tuple[Tensor, Tensor, Tensor], at: Places,
    token_ids: Tensor, ancestors: Tensor,
) -> None:  # fmt: skip
    """Fill the last token of each request, then the nodes of its tree.

    Args:
        tokens: the last tokens int64 [R], the nodes int64 [R, N - 1], and the row that each node follows, as many.
        token_ids: int64 [R * N], written.
        ancestors: int64 [R * N], written; see `AttentionMetadata.ancestors`.
    """
    last, nodes, parents = tokens
    given = RowInputs(start_positions, block_table, None, last[:, None], nodes, parents)
    ops.begin_rows(given, plan, Rows(*at, token_ids, ancestors=ancestors))


def prompt_rows(
    plan: RowPlan, start_positions: Tensor, block_table: Tensor, counts: Tensor, at: Places,
    last_row: Tensor | None = None,
) -> None:  # fmt: skip
    """Fill the places of the rows of prompts, which have their tokens already.

    Args:
        counts: int64 or int32 [R]: real rows of each prompt.
        last_row: int64 [R], written: the last real row.
    """
    ops.begin_rows(RowInputs(start_positions, block_table, counts), plan, Rows(*at, last_rows=last_row))
