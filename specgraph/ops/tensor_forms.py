"""The check of tensors that a user made: each has a form, written as the docstring of its field writes it."""

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
    """Return whether a tensor has memory in rows and columns: it is neither sparse nor freed nor on the meta device."""
    return tensor.layout is torch.strided and not tensor.is_meta and not is_freed(tensor)


def is_freed(tensor: Tensor) -> bool:
    """Return whether the storage of a strided tensor ends before its last element, as `untyped_storage().resize_(0)`
    makes it: reading it would read memory of others."""
    count = tensor.numel()
    if count == 0 or tensor.is_meta:
        return False
    if not tensor.is_contiguous():
        count = 1 + sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return (tensor.storage_offset() + count) * tensor.element_size() > tensor.untyped_storage().nbytes()


def described(tensor: Tensor) -> str:
    """Return what a message says of a tensor."""
    layout = "" if tensor.layout is torch.strided else f" {tensor.layout}"
    freed = " with its storage freed" if not layout and is_freed(tensor) else ""
    return f"{list(tensor.shape)} {tensor.dtype}{layout} on {tensor.device}{freed}"


def dtype_of(tensor: Any) -> str:
    """Return the dtype of a tensor as a form has it; "floats" for anything else."""
    return str(tensor.dtype).removeprefix("torch.") if isinstance(tensor, Tensor) else "floats"


def dimensions(tensor: Tensor) -> list[tuple[int, int]]:
    """Return (stride in bytes, size) of each dimension in which a tensor has more than one element, and of the bytes of
    an element."""
    size = tensor.element_size()
    own = [(stride * size, count) for stride, count in zip(tensor.stride(), tensor.shape, strict=True)]
    return [(stride, count) for stride, count in (*own, (1, size)) if count > 1]


def repeats(tensor: Tensor) -> bool:
    """Return whether a dimension is not beyond those of smaller strides, so that elements share memory."""
    reach = 0
    for stride, count in sorted(dimensions(tensor)):
        if stride <= reach:
            return True
        reach += stride * (count - 1)
    return False


def check_named(what: str, given: Any) -> Mapping[str, Tensor]:
    """Return what a model or attention gave for the read set, a mapping of tensors.

    Args:
        what: the call that gave it.

    Raises:
        ConfigError: it is something else, or the storage of a tensor is freed; the message names the call.
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
    """Check the tensors of one object, which are all on one device.

    Args:
        owner: the object, for messages.
        given: at least what `forms` names.
        forms: by name, such as "float32 [R, vocab] or None", "integers [n]" or "floats [rows, 8]". A size of one name
            is the same in all tensors.
        written: they are written, so that none may have elements that share memory.

    Raises:
        ConfigError: naming the first tensor of another form.
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
    """Return dtype, sizes by name, and whether None is allowed."""
    needed = form.removesuffix(" or None")
    dtype, _, dims = needed.partition(" ")
    return dtype, tuple(dims.strip("[]").replace(",", "").split()), needed != form
