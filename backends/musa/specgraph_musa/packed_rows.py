"""Op arguments with packed rows, for kernels that take a tensor's first stride and no other.

A row is tensor[i]. It is packed if its elements are contiguous. KV caches stay as they are, since the kernels take all
strides of theirs: a host engine may keep keys and values side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from specgraph.ops.kv_cache import KVCache
from specgraph.ops.library import Op
from torch import Tensor


def with_packed_rows(op: Op[Any, Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a device's implementation of an op: it gets a contiguous copy of each argument without packed rows.

    Raises (when called):
        ValueError: if the op writes an argument without packed rows: a copy would lose the written values.
    """
    by_name = {parameter.name: parameter for parameter in op.parameters.all}
    strided = {"key_cache", "value_cache", *(name for name, p in by_name.items() if p.record is KVCache)}

    def one(name: str, value: Any) -> Any:
        given = packed(value) if isinstance(value, Tensor) else value
        if given is not value and name in op.parameters.written:
            raise ValueError(
                f"{op.name} writes '{name}', whose strides are {tuple(value.stride())} for shape {list(value.shape)}: "
                "its rows must be packed"
            )
        return given

    def whole(name: str, value: Any) -> Any:
        parameter = by_name[name]
        if value is None or name in strided:
            return value
        if parameter.record is None:
            return one(name, value)
        return parameter.record(*map(one, parameter.flat, value))

    @wraps(function)
    def implementation(*args: Any, **kwargs: Any) -> Any:
        named = {name: whole(name, value) for name, value in kwargs.items()}
        return function(*map(whole, by_name, args), **named)

    return implementation


def packed(tensor: Tensor) -> Tensor:
    """Return the tensor if its rows are packed. Otherwise return a contiguous copy."""
    return tensor if (tensor[:1] if tensor.dim() > 1 else tensor).is_contiguous() else tensor.contiguous()
