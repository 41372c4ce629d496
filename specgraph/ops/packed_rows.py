"""Op arguments with packed rows, for kernels that take the stride of their rows and no other.

A row is what one index of the first dimension names; it is packed if its elements are contiguous.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from specgraph.ops.library import NAMESPACE


def with_packed_rows(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, a device's implementation of the op `name`, called with arguments whose rows are packed.

    Raises (when called):
        ValueError: an argument that the op writes has rows with gaps.
    """
    schema = getattr(getattr(torch.ops, NAMESPACE), name).default._schema

    @functools.wraps(function)
    def implementation(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = packed_arguments(schema, args, kwargs)
        return function(*args, **kwargs)

    return implementation


def packed(tensor: Tensor) -> Tensor:
    """`tensor` if its rows are packed, else a contiguous copy."""
    return tensor if (tensor[:1] if tensor.dim() > 1 else tensor).is_contiguous() else tensor.contiguous()


def packed_arguments(
    schema: torch.FunctionSchema, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of one op call, each tensor with packed rows. Raises ValueError where an argument that the op
    writes has none: a copy would lose what is written."""
    named = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | dict(kwargs)
    written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    for name, value in named.items():
        given = packed(value) if isinstance(value, Tensor) else value
        if given is not value and name in written:
            raise ValueError(
                f"{schema.name} writes '{name}', whose strides are {tuple(value.stride())} for shape "
                f"{list(value.shape)}: its rows must be packed"
            )
        named[name] = given
    return tuple(named.values())[: len(args)], {name: named[name] for name in kwargs}
