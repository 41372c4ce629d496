"""Ops on meta tensors, which give the shape of a result, without torch's compiler: it takes 3 s of a start-up.

torch's own meta kernels of element-wise ops, `cat`, `mean` and random numbers import it at their first call; those here
take their place where a result has no special strides.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from specgraph.device.cpu.baking import map_tensors
from specgraph.dispatch_mode import tensors_in

_aten = torch.ops.aten


def on_meta(func: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Call an op with meta tensors."""
    if any(a.name == "device" for a in func._schema.arguments):
        return _KERNELS.get(func, func)(*args, **{**kwargs, "device": "meta"})
    if torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags:
        return _pointwise(func, *args, **kwargs)
    return _KERNELS.get(func, func)(*args, **kwargs)


def _pointwise(func: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Return a result of the broadcast shape; its dtype is the one that `func` gives to one element."""

    def one(tensor: torch.Tensor) -> torch.Tensor:
        return torch.ones((1,) * tensor.dim(), dtype=tensor.dtype, device="cpu")

    given, is_written = tensors_in(args, list(kwargs.values())), func._schema.is_mutable
    shape = torch.broadcast_shapes(*(t.shape for t in given))
    fits = shape == args[0].shape if is_written else all(t.is_contiguous() for t in given)
    if not fits or any(a.is_out for a in func._schema.arguments):
        return func(*args, **kwargs)
    result = func(*map_tensors(args, one), **{k: map_tensors(v, one) for k, v in kwargs.items()})
    return args[0] if is_written else torch.empty(shape, dtype=result.dtype, device="meta")


def _cat(tensors: list[torch.Tensor], dim: int = 0) -> torch.Tensor:
    first = tensors[0]
    if not -first.dim() <= dim < first.dim():
        return _aten.cat(tensors, dim)
    dim %= first.dim()
    before, after = first.shape[:dim], first.shape[dim + 1 :]
    alike = {(t.dtype, t.is_contiguous(), t.shape[:dim], t.shape[dim + 1 :]) for t in tensors}
    if alike != {(first.dtype, True, before, after)}:
        return _aten.cat(tensors, dim)
    return first.new_empty(*before, sum(t.shape[dim] for t in tensors), *after)


def _mean(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return (_aten.sum if x.is_floating_point() else _aten.mean)(x, *args, **kwargs)


def _itself(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return x


_KERNELS: dict[OpOverload, Callable[..., Any]] = {
    _aten.cat.default: _cat,
    _aten.mean.default: _mean,
    _aten.mean.dim: _mean,
    _aten.randn_like.default: _aten.empty_like.default,
    **{getattr(_aten, f"{name}_").default: _itself for name in ("normal", "log_normal", "exponential")},
}
