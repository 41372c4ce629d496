"""The rows of verify passes: one class for chains, one for trees. See `specgraph.attention.rows`."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from specgraph import ops
from specgraph.attention.rows import Limits, Places
from specgraph.ops.begin_rows import RowInputs, RowPlan, Rows
from specgraph_run.decoder import ops as decoder_ops


class ToVerify(NamedTuple):
    """The inputs of a verify of R requests."""

    start_positions: Tensor
    """int64 [R]: positions of the last tokens. A negative one makes a request inert."""
    block_table: Tensor
    """int32 [R, max_blocks]"""
    last_token_ids: Tensor
    """int64 [R]"""
    draft_token_ids: Tensor
    """int64 [R, N - 1]"""

    def inputs(self, draft_parents: Tensor | None = None) -> RowInputs:
        """Return the inputs in the form that `begin_rows` takes."""
        return RowInputs(
            self.start_positions,
            self.block_table,
            token_ids=self.last_token_ids[:, None],
            draft_token_ids=self.draft_token_ids,
            draft_parents=draft_parents,
        )


class VerifyRows(RowPlan):
    """The last token of each request, then its drafts."""

    __slots__ = ()

    @classmethod
    def of(cls, rows: int, limits: Limits) -> VerifyRows:
        """Plan `rows` rows per request."""
        return cls(rows, *limits)

    def fill(self, given: ToVerify, at: Places, token_ids: Tensor, ragged: decoder_ops.RaggedRows | None) -> None:
        """Fill the rows.

        Args:
            token_ids: int64 [R * N], written.
            ragged: the split of the rows if requests have different numbers of drafts.
        """
        if ragged is None:
            ops.begin_rows(given.inputs(), self, Rows(**at._asdict(), token_ids=token_ids))
        else:
            decoder_ops.begin_ragged_rows(given.inputs(), self, Rows(**at._asdict(), token_ids=token_ids), ragged)


class TreeRows(RowPlan):
    """The last token of each request, then the nodes of its tree."""

    __slots__ = ()

    @classmethod
    def of(cls, rows: int, limits: Limits, tree_steps: int) -> TreeRows:
        """Plan trees of `rows` rows. `tree_steps` is the depth of the deepest node."""
        return cls(rows, *limits, tree_steps=tree_steps)

    def fill(self, given: ToVerify, draft_parents: Tensor, at: Places, token_ids: Tensor, ancestors: Tensor) -> None:
        """Fill the rows.

        Args:
            draft_parents: int64 [R, N - 1]: the row that each node follows.
            token_ids: int64 [R * N], written.
            ancestors: int64 [R * N], written; see `AttentionMetadata.ancestors`.
        """
        ops.begin_rows(
            given.inputs(draft_parents), self, Rows(**at._asdict(), token_ids=token_ids, ancestors=ancestors)
        )
