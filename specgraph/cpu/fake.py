"""Shapes, strides, dtypes and aliasing of an op's results, without running it.

The op is called with meta tensors. torch's own meta kernels of element-wise ops, `cat`, `stack`, `addmm`, `mean`,
cumulative and random ops import torch's compiler at their first call, which takes 3 s of a start-up. The functions here
replace them if the result has no special strides.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial, reduce
from itertools import combinations
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import TreeSpec, tree_flatten

from specgraph.cpu.baking import map_tensors
from specgraph.dispatch_mode import tensors_in

_aten = torch.ops.aten


@dataclass(slots=True)
class Inferred:
    """The results that a call would return. `aliases[i]` is the index of the input that shares storage with output i,
    or None."""

    outputs: list[Any]
    """Tensors without memory, and any other returned values."""
    devices: set[str]
    """The types of the devices of the results."""
    spec: TreeSpec
    aliases: list[int | None]
    resized: int | None
    """The index of the input that the call would resize, or None."""


_KNOWN_LIMIT = 8192
_known: dict[Hashable, Inferred] = {}
"""Results by call. Captures repeat the same few calls, and inferring the results is the longest part of recording."""


def infer(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inferred:
    """Return the results of a call, inferred on tensors without memory. Raises the errors of torch's fake tensor mode.

    Results are cached by op, arguments and default dtype: a fake implementation must depend on nothing else.
    """
    key = _key(func, args, kwargs)
    if key is None:
        return _infer(func, args, kwargs)
    if (found := _known.get(key)) is None:
        if len(_known) >= _KNOWN_LIMIT:
            _known.clear()
        found = _known[key] = _infer(func, args, kwargs)
    return found


def _infer(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inferred:
    """Run the op's meta kernel if all tensors are on the CPU. If that gives no result, run torch's fake tensor mode."""
    given = tensors_in(args, list(kwargs.values()))
    if all(t.device.type == "cpu" for t in given) and str(kwargs.get("device", "cpu")) == "cpu":
        try:
            found = _run(func, args, kwargs, None)
        except Exception:  # the fake tensor mode raises the error that names the reason
            found = None
        if found is not None and found.devices <= {"meta"}:
            found.devices = {"cpu"} if found.devices else set()
            return found
    return _run(func, args, kwargs, FakeTensorMode())


def _run(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], mode: FakeTensorMode | None) -> Inferred:
    storages: dict[int, torch.UntypedStorage] = {}
    fakes: list[torch.Tensor] = []

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        real = tensor.untyped_storage()
        storage = storages.get(real._cdata)
        if storage is None:
            storage = storages[real._cdata] = torch.UntypedStorage(real.nbytes(), device="meta")
        meta = torch.empty(0, dtype=tensor.dtype, device="meta")
        meta.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
        fakes.append(meta if mode is None else FakeTensor(mode, meta, tensor.device))
        return fakes[-1]

    with torch.inference_mode(False), torch.no_grad(), nullcontext() if mode else no_dispatch():
        fake_args, fake_kwargs = map_tensors((args, kwargs), fake)
        before = [f.untyped_storage().nbytes() for f in fakes]
        with mode or nullcontext():
            result = func(*fake_args, **fake_kwargs) if mode else _on_meta(func, *fake_args, **fake_kwargs)
        outputs, spec = tree_flatten(result)
        owner = {f.untyped_storage()._cdata: i for i, f in reversed(list(enumerate(fakes)))}
        aliases: list[int | None] = []
        for out in outputs:
            index = next((i for i, f in enumerate(fakes) if f is out), None)
            if index is None and isinstance(out, torch.Tensor):
                index = owner.get(out.untyped_storage()._cdata)
            aliases.append(index)
        resized = next((i for i, f in enumerate(fakes) if f.untyped_storage().nbytes() != before[i]), None)
    return Inferred(outputs, {t.device.type for t in tensors_in(outputs)}, spec, aliases, resized)


_PLAIN = (int, float, bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


def _key(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable | None:
    """Return the cache key of a call, with all that its result may depend on. None if an argument has no key."""
    parts: list[Hashable] = [func, torch.get_default_dtype()]
    storages: dict[int, int] = {}

    def add(value: Any) -> bool:
        if value is None:
            parts.append(None)
        elif isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            shared = storages.setdefault(storage._cdata, len(storages))
            place = value.storage_offset(), tuple(value.size()), value.stride()
            parts.append((value.dtype, value.device, place, shared, storage.nbytes()))
        elif isinstance(value, (list, tuple)):
            parts.append((type(value), len(value)))
            return all(map(add, value))
        elif isinstance(value, _PLAIN):
            parts.append((type(value), value))  # 1, 1.0 and True are equal, and give different dtypes
        else:
            return False
        return True

    if not all(map(add, args)):
        return None
    for name, value in kwargs.items():
        parts.append(name)
        if not add(value):
            return None
    return tuple(parts)


def _on_meta(func: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Call an op with meta tensors."""
    if any(a.name == "device" for a in func._schema.arguments):
        return _KERNELS.get(func, func)(*args, **{**kwargs, "device": "meta"})
    if func not in _KERNELS and torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags:
        return _pointwise(func, *args, **kwargs)
    return _KERNELS.get(func, func)(*args, **kwargs)


def _pointwise(func: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Return a result of the broadcast shape. Its dtype is the dtype of `func` on single elements."""

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
    """Return a tensor with the strides of an element-wise result. None if the operands' strides differ and `_swapped`
    is True for two dimensions."""
    if all(t.is_contiguous() for t in read):
        return torch.empty(shape, device="meta")
    strides = [t.expand(shape).stride() for t in read]
    if len(set(strides)) == 1:
        return read[0].expand(shape)
    pairs = combinations(range(len(shape)), 2)
    return None if any(_swapped(shape, strides, *pair) for pair in pairs) else torch.empty(shape, device="meta")


def _swapped(shape: torch.Size, strides: list[tuple[int, ...]], outer: int, inner: int) -> bool:
    """Return whether the first operand whose strides order two dimensions has the inner one around the outer one."""
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
