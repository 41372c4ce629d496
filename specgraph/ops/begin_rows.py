"""The first op of each captured pass: it makes the rows, with tokens, positions, lengths and KV slots, from a batch.

It is one op for every kind of pass, and runs inside the graph: a whole propose is then one launch, and the host never
reads an accepted count. As in vLLM's padded drafter batch, rejected rows stay in the batch and are never selected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specgraph.ops.library import op
from specgraph.ops.paged_attention import HostLengths
from specgraph.ops.past_rows import PastRows, find_past_rows
from specgraph.ops.slots import count_rows_without_block, slots_of


class RowPlan(NamedTuple):
    """The rows of a pass: the same number for each request, and the same in every replay of its graph.

    A batch has one column per token of a request; the tokens of the first `num_sampled` columns are known. Row i of a
    request is at position begin + i.
    """

    rows: int
    """Rows per request."""
    max_model_len: int
    block_size: int
    """Tokens per block."""
    past: int = 0
    """The rows begin this number of positions before the start position, but never before position 0."""
    after_sampled: bool = False
    """The rows begin after the rows of the sampled tokens instead, and the first row holds the last sampled token."""
    rows_behind: int = 0
    """Rows after the row of the last sampled token, in this pass or in later draft steps. Rows of this pass get slots;
    `Rows.rows_without_block` counts all of them."""
    slots_of_rejected: bool = False
    """Rows of rejected tokens get slots too. Later draft steps write there before any row sees them."""
    filler: int = 0
    """The token of a row without a known token: 0, or the drafter's mask token."""
    position_offset: int = 0
    """Added to the start positions of the batch."""
    tree_steps: int = 0
    """The depth of the tree if the rows are nodes of a tree. Otherwise 0."""

    def seq_len(self, start: int, count: int) -> int:
        """Return the length that the op gives a request on the device, for attention with host lengths.

        Args:
            start: the request's start position.
            count: its `num_sampled`. Without `after_sampled` it matters only whether this is 0.
        """
        if count == 0:
            return 0
        if self.after_sampled:
            return min(start + self.position_offset + count + self.rows, self.max_model_len)
        return max(start + self.position_offset - self.past, 0) + self.rows

    def host_lengths(self, starts: Sequence[int], padded: int) -> HostLengths:
        """Return the lengths of a pass over rows that all have known tokens.

        Args:
            starts: the start positions of the real requests. A negative one makes its request inert.
            padded: the number of requests with padding.
        """
        seq_lens = [self.seq_len(start, self.rows if start >= 0 else 0) for start in starts]
        return HostLengths([self.rows] * padded, seq_lens + [0] * (padded - len(starts)))

    def step_seq_len(self, start: int, count: int) -> int:
        """Return the length that the op writes into `Rows.step_seq_lens`; see `seq_len`."""
        return start + self.position_offset + count if count else 0


class RowInputs(NamedTuple):
    """The tensors that `begin_rows` makes the rows of R requests from: a batch, drafts to verify, or a prompt."""

    start_positions: Tensor
    """int64 [R]: the position of column 0."""
    block_table: Tensor
    """int32 [R, max_blocks]. If the rows are nodes of a tree, every row must have a block."""
    num_sampled: Tensor | None = None
    """int32 or int64 [R]: the number of columns with a known token; 0 makes a request inert. None if all tokens are
    known: a negative start position then makes a request inert."""
    token_ids: Tensor | None = None
    """int64 [R, query_len]: the tokens of the columns. Values after the known ones are ignored. None if the pass has
    its tokens already."""
    draft_token_ids: Tensor | None = None
    """int64 [R, K]: further columns, after `token_ids`. -1 is no draft token: the verify rejects its row."""
    draft_parents: Tensor | None = None
    """int64 [R, N - 1] for trees: the parent row of each node. Column i is about row i + 1, and a parent's row has a
    smaller number than its child's."""
    hidden: Tensor | None = None
    """[R * query_len, hidden_size]: the hidden states of the columns. Needed if `Rows.hidden` is written."""


class Rows(NamedTuple):
    """The tensors that a pass with L rows per request reads. The op writes every one that is not None."""

    positions: Tensor
    """int64 [R * L]: below max_model_len; 0 for inert requests. The position of a tree's node is start + its depth."""
    slot_mapping: Tensor
    """int64 [R * L]. A node of a tree has the slot of its row, also past max_model_len: its position may lie before."""
    seq_lens: Tensor
    """int32 [R]: begin + L, because bottom-right causal attention lets row i see seq_len - L + 1 + i keys; 0 for inert
    requests. At most max_model_len with `RowPlan.after_sampled`: such rows attend without a causal mask."""
    token_ids: Tensor | None = None
    """int64 [R * L]"""
    last_rows: Tensor | None = None
    """int64 [R * n], indices into the R * L rows: the row of the last sampled token and the n - 1 rows after it."""
    step_positions: Tensor | None = None
    """int64 [R]: the position of the last sampled token's row. `advance` goes on from it."""
    step_seq_lens: Tensor | None = None
    """int32 [R]: the length up to that row; 0 for inert requests."""
    draft_step: Tensor | None = None
    """int64 [1]: set to 0."""
    hidden_rows: Tensor | None = None
    """int64 [R * L]: the line of `RowInputs.hidden` that a row takes its hidden state from, or R * query_len if the
    row's token is not known."""
    hidden: Tensor | None = None
    """[R * L, hidden_size]: the hidden state of each row, from the batch or from the kept past rows. Otherwise 0."""
    context_positions: Tensor | None = None
    """int64 [R * query_len]: the positions of the batch's columns, for a pass with rows after them. 0 for a column
    without a known token."""
    context_slots: Tensor | None = None
    """int64 [R * query_len]: the slots of the columns. NULL_SLOT for a column without a known token."""
    ancestors: Tensor | None = None
    """int64 [R * L] for trees: bit i of a row is set if row i is the row itself or one of its ancestors."""
    rows_without_block: Tensor | None = None
    """int64 [1]: the op adds the number of rows that have no KV block, see `count_rows_without_block`."""


@op(writes=("rows",))
def begin_rows(given: RowInputs, plan: RowPlan, rows: Rows, past: PastRows | None = None) -> None:
    """Fill the rows of a pass.

    A row has a slot if its token is known, or if it is one of the `rows_behind` rows after the last known token. A past
    row takes its kept token and hidden state. A past row that was not kept has no slot, nor do the rows before it.
    Rows without a slot are never selected.

    Args:
        past: the kept past rows. Needed if `plan.past` is not 0.
    """
    at = _places(plan, given)
    position, reserved, kept = at.position, plan.max_model_len, at.live & (at.column >= 0)
    if not plan.slots_of_rejected:
        kept = kept & (at.column < at.columns + plan.rows_behind)
    if given.token_ids is not None:
        kept = kept | _write_columns(given, plan, rows, past, at, given.token_ids)
    if given.draft_parents is not None and rows.ancestors is not None:
        depth, bits = _depths_and_ancestors(given.draft_parents, plan.tree_steps)
        position, reserved = at.start + depth, given.block_table.shape[1] * plan.block_size
        rows.ancestors.copy_(bits.flatten())
    rows.positions.copy_(_clamped(position, at.live, plan))
    rows.slot_mapping.copy_(slots_of(at.position, given.block_table, kept, reserved, plan.block_size).flatten())
    length = (at.begin + plan.rows).clamp(max=plan.max_model_len) if plan.after_sampled else at.begin + plan.rows
    rows.seq_lens.copy_(torch.where(at.live, length, 0)[:, 0])
    if rows.last_rows is not None:
        last = at.request * plan.rows + (at.start - at.begin + at.columns - 1).clamp(min=0)
        rows.last_rows.copy_((last + torch.arange(rows.last_rows.shape[0] // len(last), device=last.device)).flatten())
    reached = torch.where(at.live, at.start + at.columns, 0)
    if rows.step_seq_lens is not None:
        rows.step_seq_lens.copy_(reached[:, 0])
    if rows.step_positions is not None:
        rows.step_positions.copy_(_clamped(reached - 1, at.live, plan))
    if rows.draft_step is not None:
        rows.draft_step.zero_()


class _Places(NamedTuple):
    """The places of R requests, [R, 1], and of their rows, [R, L]."""

    request: Tensor
    start: Tensor
    columns: Tensor
    """The number of columns with a known token."""
    live: Tensor
    begin: Tensor
    position: Tensor
    """Positions, not clamped."""
    column: Tensor
    """The column of the batch that a row takes its token from; negative for a past row."""


def _places(plan: RowPlan, given: RowInputs) -> _Places:
    device = given.block_table.device
    start = given.start_positions[:, None] + plan.position_offset
    count = torch.where(start < 0, 0, plan.rows) if given.num_sampled is None else given.num_sampled[:, None].long()
    begin = start + count if plan.after_sampled else (start - plan.past).clamp(min=0)
    index = torch.arange(plan.rows, device=device)
    column = index + count - 1 if plan.after_sampled else index + begin - start
    request = torch.arange(start.shape[0], device=device)[:, None]
    return _Places(request, start, count, count > 0, begin, begin + index, column)


def _write_columns(
    given: RowInputs, plan: RowPlan, rows: Rows, past: PastRows | None, at: _Places, columns: Tensor
) -> Tensor:
    """Write the tensors of `rows` that are made from the batch's columns: tokens, hidden states, context and counts.

    Returns:
        bool [R, L], or [R, 1] and False without past rows: True for a past row that was kept.
    """
    if given.draft_token_ids is not None:
        columns = torch.cat([columns, given.draft_token_ids], dim=1).clamp(min=0)
    query_len, limit, found = columns.shape[1], plan.max_model_len, torch.zeros_like(at.live)
    known, own = (at.column >= 0) & (at.column < at.columns), at.column.clamp(0, query_len - 1)
    token = torch.where(known, columns.gather(1, own), plan.filler)
    line = at.request * query_len + own
    if past is not None and rows.hidden is not None and given.hidden is not None:
        wanted = at.live & (at.column < 0)
        found, entry = find_past_rows(at.position, wanted, given.block_table, past, limit, plan.block_size)
        token = torch.where(found, past.token_ids.flatten()[entry], token)
        states = torch.where(known[:, :, None], given.hidden[line], 0.0)
        states = torch.where(found[:, :, None], past.hidden.flatten(0, 1)[entry], states)
        rows.hidden.copy_(states.flatten(0, 1))
    if rows.token_ids is not None:
        rows.token_ids.copy_(token.flatten())
    if rows.hidden_rows is not None:
        rows.hidden_rows.copy_(torch.where(known, line, columns.numel()).flatten())
    if rows.context_positions is not None and rows.context_slots is not None:
        column = torch.arange(query_len, device=columns.device)
        position, inside = at.start + column, column < at.columns
        rows.context_positions.copy_(_clamped(position, inside, plan))
        rows.context_slots.copy_(slots_of(position, given.block_table, inside, limit, plan.block_size).flatten())
    if rows.rows_without_block is not None:
        start, count, most = at.start[:, 0], at.columns[:, 0], query_len + plan.rows_behind
        later = torch.where(at.live[:, 0], count + plan.rows_behind, 0)
        count_rows_without_block(rows.rows_without_block, start, later, given.block_table, most, limit, plan.block_size)
    return found


def _clamped(positions: Tensor, valid: Tensor, plan: RowPlan) -> Tensor:
    return torch.where(valid, positions, 0).clamp(0, plan.max_model_len - 1).flatten()


def _depths_and_ancestors(draft_parents: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Return the depth of each row of trees, and the bits of its ancestors and its own: int64 [R, N] each."""
    parents = torch.cat([torch.zeros_like(draft_parents[:, :1]), draft_parents], dim=1)
    row = torch.arange(parents.shape[1], device=parents.device)
    own = torch.ones_like(row) << row
    bits, depth = own.expand_as(parents), torch.zeros_like(parents)
    for _ in range(steps):  # each pass carries depths and ancestors one level down
        bits = own | bits.gather(1, parents)
        depth = torch.where(row > 0, depth.gather(1, parents) + 1, 0)
    return depth, bits
