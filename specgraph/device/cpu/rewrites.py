"""Ops without an `out=` form whose result another op writes into the captured block, with the same bits.

Each rewrite follows from how torch itself implements the op on the CPU: `_to_copy` allocates and calls `copy_`, `full`
allocates and calls `fill_`, `embedding` is `index_select`, `add_.Scalar` wraps the number and calls `add_.Tensor`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload

_aten = torch.ops.aten
_Call = Callable[[], Any]


def rewrite(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], blocks: tuple[torch.Tensor, ...]
) -> _Call | None:
    """Return a call equivalent to `func` that writes its result into `blocks[0]`, or None if there is none."""
    rule = _INTO_BLOCK.get(func) if len(blocks) == 1 else _IN_PLACE.get(func) if not blocks else None
    return rule(args, kwargs, *blocks) if rule is not None else None


def _copy(args: tuple[Any, ...], kwargs: dict[str, Any], block: torch.Tensor) -> _Call | None:
    return None if kwargs.get("device") not in (None, torch.device("cpu")) else partial(block.copy_, args[0])


def _fill(position: int) -> Callable[[tuple[Any, ...], dict[str, Any], torch.Tensor], _Call | None]:
    def into(args: tuple[Any, ...], kwargs: dict[str, Any], block: torch.Tensor) -> _Call | None:
        return partial(block.fill_, args[position]) if len(args) > position else None

    return into


def _constant(value: int) -> Callable[[tuple[Any, ...], dict[str, Any], torch.Tensor], _Call]:
    def into(args: tuple[Any, ...], kwargs: dict[str, Any], block: torch.Tensor) -> _Call:
        return partial(block.fill_, value)

    return into


def _arange(args: tuple[Any, ...], kwargs: dict[str, Any], block: torch.Tensor) -> _Call:
    return partial(torch.arange, *args, out=block)


def _embedding(args: tuple[Any, ...], kwargs: dict[str, Any], block: torch.Tensor) -> _Call | None:
    weight, indices = args[:2]
    if not (indices.is_contiguous() and block.is_contiguous()):
        return None
    return partial(torch.index_select, weight, 0, indices.view(-1), out=block.view(-1, weight.size(1)))


def _scalar(function: Callable[..., Any]) -> Callable[[tuple[Any, ...], dict[str, Any]], _Call]:
    def in_place(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        alpha = {"alpha": args[2]} if len(args) > 2 else {}
        return partial(function, *args[:2], **alpha, **kwargs)

    return in_place


_INTO_BLOCK: dict[OpOverload, Callable[..., _Call | None]] = {
    _aten._to_copy.default: _copy,
    _aten.clone.default: _copy,
    _aten.scalar_tensor.default: _fill(0),
    _aten.full.default: _fill(1),
    _aten.full_like.default: _fill(1),
    _aten.new_full.default: _fill(2),
    _aten.zeros.default: _constant(0),
    _aten.zeros_like.default: _constant(0),
    _aten.new_zeros.default: _constant(0),
    _aten.ones.default: _constant(1),
    _aten.ones_like.default: _constant(1),
    _aten.new_ones.default: _constant(1),
    _aten.arange.default: _arange,
    _aten.arange.start: _arange,
    _aten.arange.start_step: _arange,
    _aten.embedding.default: _embedding,
}

_IN_PLACE: dict[OpOverload, Callable[..., _Call]] = {
    _aten.add_.Scalar: _scalar(torch.Tensor.add_),
    _aten.sub_.Scalar: _scalar(torch.Tensor.sub_),
    _aten.mul_.Scalar: _scalar(torch.Tensor.mul_),
    _aten.div_.Scalar: _scalar(torch.Tensor.div_),
}
