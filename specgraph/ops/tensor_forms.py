"""Checks tensors that a user made against forms such as "float32 [R, vocab] or None", as docstrings of fields have."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from specgraph.errors import ConfigError
from specgraph.validation import shown

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_DTYPES: Mapping[str, Callable[[torch.dtype], bool]] = {
    "integers": lambda dtype: dtype in INTEGERS,
    "floats": lambda dtype: dtype.is_floating_point,
    "any": lambda dtype: True,
}


def has_rows(tensor: Tensor) -> bool:
    """Return whether a tensor has strided memory: it is not sparse, not freed and not on the meta device."""
    return tensor.layout is torch.strided and not tensor.is_meta and not is_freed(tensor)


def is_freed(tensor: Tensor) -> bool:
    """Return whether the storage of a strided tensor ends before its last element.

    That is so after `untyped_storage().resize_(0)`. A read would then read the memory of other tensors.
    """
    count = tensor.numel()
    if count == 0 or tensor.is_meta:
        return False
    if not tensor.is_contiguous():
        count = 1 + sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return (tensor.storage_offset() + count) * tensor.element_size() > tensor.untyped_storage().nbytes()


def described(tensor: Tensor) -> str:
    """Describe a tensor for an error's message: shape, dtype, layout, device, and whether its storage is freed."""
    layout = "" if tensor.layout is torch.strided else f" {tensor.layout}"
    freed = " with its storage freed" if not layout and is_freed(tensor) else ""
    return f"{list(tensor.shape)} {tensor.dtype}{layout} on {tensor.device}{freed}"


def dtype_of(tensor: Any) -> str:
    """Return the dtype of a tensor as a form writes it, or "floats" for anything else."""
    return str(tensor.dtype).removeprefix("torch.") if isinstance(tensor, Tensor) else "floats"


def dimensions(tensor: Tensor) -> list[tuple[int, int]]:
    """Return (stride in bytes, size) of each dimension with a size above 1. An element's bytes count as a dimension."""
    size = tensor.element_size()
    own = [(stride * size, count) for stride, count in zip(tensor.stride(), tensor.shape, strict=True)]
    return [(stride, count) for stride, count in (*own, (1, size)) if count > 1]


def repeats(tensor: Tensor) -> bool:
    """Return whether elements share memory: a dimension's stride is within the reach of the smaller strides."""
    reach = 0
    for stride, count in sorted(dimensions(tensor)):
        if stride <= reach:
            return True
        reach += stride * (count - 1)
    return False


def check_named(what: str, given: Any) -> Mapping[str, Tensor]:
    """Check and return a mapping of tensors that a model or an attention gave for the read set.

    Args:
        what: the call that gave it, for messages.

    Raises:
        ConfigError: if `given` is no mapping of names to tensors, or if the storage of a tensor is freed.
    """
    named: Mapping[Any, Any] = given if isinstance(given, Mapping) else {"": given}
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor) or not name or not isinstance(name, str):
            place = f"{what}[{reprlib.repr(name)}]" if name else what
            raise ConfigError(f"{place} is of type {type(tensor).__name__}: return a dict of tensors by name")
        if tensor.layout is torch.strided and is_freed(tensor):
            raise ConfigError(f"{what}['{name}'] is {described(tensor)}: give a tensor that has its memory")
    return named


def check_forms(owner: str, given: Mapping[str, Any], forms: Mapping[str, str], written: bool = False) -> None:
    """Check the tensors of one object against their forms. All must be on one device.

    Args:
        owner: the object, for messages.
        given: tensors by name; every name of `forms` must be there.
        forms: by name, such as "float32 [R, vocab] or None", "integers [n]" or "floats [rows, 8]". A named size must
            be equal in all tensors.
        written: the tensors are written, so their elements may not share memory.

    Raises:
        ConfigError: if a tensor has another form. The message names the first one.
    """
    sizes: dict[str, int] = {}
    device: torch.device | None = None
    for name, form in forms.items():
        dtype, dims, optional = _parsed(form)
        tensor = given[name]
        if tensor is None and optional:
            continue
        if not isinstance(tensor, Tensor):
            raise ConfigError(f"{owner}: {name} must be a tensor, {form}, got {shown(tensor)}")
        device = device or tensor.device
        wanted = [int(dim) if dim.isdigit() else sizes.get(dim) for dim in dims]
        same = len(wanted) == tensor.dim() and all(
            want in (None, got) for want, got in zip(wanted, tensor.shape, strict=True)
        )
        of_dtype = _DTYPES[dtype](tensor.dtype) if dtype in _DTYPES else str(tensor.dtype) == f"torch.{dtype}"
        is_whole = tensor.layout is torch.strided and not is_freed(tensor)
        if not (same and of_dtype and tensor.device == device and is_whole):
            known = "".join(f", {dim} = {sizes[dim]}" for dim in dims if dim in sizes)
            raise ConfigError(f"{owner}: {name} is {described(tensor)}, expected {form} on {device}{known}")
        if written and repeats(tensor):
            raise ConfigError(
                f"{owner}: {name} has strides {tensor.stride()}, by which several of its elements share memory: give "
                "one that has memory for each, such as a clone"
            )
        sizes |= zip(dims, tensor.shape, strict=True)


@cache
def _parsed(form: str) -> tuple[str, tuple[str, ...], bool]:
    """Return the dtype, the names of the sizes, and whether None is allowed."""
    needed = form.removesuffix(" or None")
    dtype, _, dims = needed.partition(" ")
    return dtype, tuple(dims.strip("[]").replace(",", "").split()), needed != form
