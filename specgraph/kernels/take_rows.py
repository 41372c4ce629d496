"""Copying or selecting rows into a persistent buffer, as one op."""

from __future__ import annotations

from torch import Tensor

from specgraph.kernels.library import define


def _take_rows(source: Tensor, rows: Tensor | None, out: Tensor) -> None:
    out.copy_(source if rows is None else source[rows])


_take_rows_op = define(
    "take_rows(Tensor source, Tensor? rows, Tensor(a!) out) -> ()",
    reference=_take_rows,
)


def take_rows(source: Tensor, rows: Tensor | None, out: Tensor) -> None:
    """out = source[rows], or source itself when `rows` is None.

    Args:
        source: [T, size].
        rows: int64 [R], each in 0..T - 1.
        out: [R, size] of the same dtype, written; shares no memory with `source`.
    """
    _take_rows_op(source, rows, out)
