"""Ops on meta tensors, which give the shape of a result, without torch's compiler: it takes 3 s of a start-up.

torch's own meta kernels of element-wise ops, `cat`, `stack`, `addmm`, `mean`, cumulative and random ops import it at
their first call; those here take their place where a result has no special strides.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from itertools import combinations
from typing import Any

import torch
from torch._ops import OpOverload

from specgraph.cpu.baking import map_tensors
from specgraph.dispatch_mode import tensors_in

_aten = torch.ops.aten


def on_meta(func: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Call an op with meta tensors."""
    if any(a.name == "device" for a in func._schema.arguments):
        return _KERNELS.get(func, func)(*args, **{**kwargs, "device": "meta"})
    if func not in _KERNELS and torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags:
        return _pointwise(func, *args, **kwargs)
    return _KERNELS.get(func, func)(*args, **kwargs)


def _pointwise(func: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Return a result of the broadcast shape; its dtype is the one that `func` gives to one element."""

    def one(tensor: torch.Tensor) -> torch.Tensor:
        return torch.ones((1,) * tensor.dim(), dtype=tensor.dtype, device="cpu")

    outs = [kwargs[a.name] for a in func._schema.arguments if a.is_out]
    read = tensors_in(args, [value for name, value in kwargs.items() if name != "out"])
    shape = torch.broadcast_shapes(*(t.shape for t in read))
    written = outs[0] if outs else args[0] if func._schema.is_mutable else None
    like = _like(shape, read) if written is None else written
    if like is None or like.shape != shape or len(outs) > 1:
        return func(*args, **kwargs)
    result = func(*map_tensors(args, one), **map_tensors(kwargs, one))
    return torch.empty_like(like, dtype=result.dtype) if written is None else written


def _like(shape: torch.Size, read: list[torch.Tensor]) -> torch.Tensor | None:
    """Return a tensor of the strides of an element-wise result; None where operands differ in strides and one of them
    is laid out with an inner dimension around an outer one."""
    if all(t.is_contiguous() for t in read):
        return torch.empty(shape, device="meta")
    strides = [t.expand(shape).stride() for t in read]
    if len(set(strides)) == 1:
        return read[0].expand(shape)
    pairs = combinations(range(len(shape)), 2)
    return None if any(_swapped(shape, strides, *pair) for pair in pairs) else torch.empty(shape, device="meta")


def _swapped(shape: torch.Size, strides: list[tuple[int, ...]], outer: int, inner: int) -> bool:
    """Return whether the first operand in which two dimensions differ has the inner one around the outer one."""
    for each in strides:
        if each[outer] and each[inner]:
            if (each[outer], shape[outer]) < (each[inner], shape[inner]):
                return True
            if each[outer] > each[inner]:
                return False
    return False


def _cat(tensors: list[torch.Tensor], dim: int = 0) -> torch.Tensor:
    first = tensors[0]
    if not -first.dim() <= dim < first.dim():
        return _aten.cat(tensors, dim)
    dim %= first.dim()
    before, after = first.shape[:dim], first.shape[dim + 1 :]
    alike = {(t.shape[:dim], t.shape[dim + 1 :]) for t in tensors}
    has_special_strides = first.dim() > 3 and not all(t.is_contiguous() for t in tensors)
    if alike != {(before, after)} or has_special_strides:
        return _aten.cat(tensors, dim)
    dtype = reduce(torch.promote_types, (t.dtype for t in tensors))
    return first.new_empty(*before, sum(t.shape[dim] for t in tensors), *after, dtype=dtype)


def _stack(tensors: list[torch.Tensor], dim: int = 0) -> torch.Tensor:
    alike = len({t.shape for t in tensors}) == 1
    return _cat([t.unsqueeze(dim) for t in tensors], dim) if alike else _aten.stack(tensors, dim)


def _addmm(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **factors: Any) -> torch.Tensor:
    result = _aten.mm(a, b)
    fits = x.dtype == a.dtype == b.dtype and torch.broadcast_shapes(x.shape, result.shape) == result.shape
    return result if fits else _aten.addmm(x, a, b, **factors)


def _cumulative(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    total = _aten.sum(x, [dim], dtype=dtype)
    return torch.empty(x.shape, dtype=total.dtype, device="meta")


def _mean(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return (_aten.sum if x.is_floating_point() else _aten.mean)(x, *args, **kwargs)


def _itself(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return x


_KERNELS: dict[OpOverload, Callable[..., Any]] = {
    _aten.addmm.default: _addmm,
    _aten.cat.default: _cat,
    _aten.clone.default: _aten.clone.default,
    _aten.cumprod.default: _cumulative,
    _aten.cumsum.default: _cumulative,
    _aten.floor_divide.default: partial(_pointwise, _aten.floor_divide.default),
    _aten.mean.default: _mean,
    _aten.mean.dim: _mean,
    _aten.randn_like.default: _aten.empty_like.default,
    _aten.stack.default: _stack,
    **{getattr(_aten, f"{name}_").default: _itself for name in ("normal", "log_normal", "exponential")},
}
