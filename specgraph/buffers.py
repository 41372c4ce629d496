"""Records of persistent tensors. Each field declares once which axes of its tensor depend on the batch. The names in
the read set, the views of a batch and the rows of each request follow from that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from torch import Tensor

BuffersT = TypeVar("BuffersT", bound="Buffers")


class Axes(NamedTuple):
    """The axes of a tensor that depend on the batch. The other axes are the same in every view.

    If a field holds a record, the record's own fields declare their axes. `rows` of the outer field then names the size
    that the record gets as "rows".
    """

    rows: str = ""
    """The number of rows per request, by its name in the `sizes` of `Buffers.views`. The rows of a request are
    consecutive on the first axis. "" if each request has one row."""
    columns: str = ""
    """The number of columns in use on the second axis, by its name in `sizes`. "" if all are in use."""
    more: int = 0
    """The number of entries on the first axis after the requests' entries."""
    is_packed: bool = False
    """True if the columns in use are consecutive in memory, so that each view is contiguous. Otherwise each row keeps
    its place."""
    per_request: bool = True
    """False if no axis depends on the batch."""
    is_view: bool = False
    """True if the memory and its name belong to another field or record."""


PerRequest = Annotated[Tensor, Axes()]
"""[R, ...]"""
PerRow = Annotated[Tensor, Axes("rows")]
"""[R * rows, ...]"""
PerDraft = Annotated[Tensor, Axes(columns="drafts")]
"""[R, drafts, ...]"""
ONCE = Axes(per_request=False)
Once = Annotated[Tensor, ONCE]
"""A tensor that is the same for every batch."""
VIEW = Axes(per_request=False, is_view=True)
"""The axes of a field that `views` leaves unchanged, and that has no name of its own."""


class Buffers:
    """The base of dataclasses that hold tensors, or other records of tensors. Every tensor is annotated with its
    `Axes`, also in a named tuple that a field holds. The first use raises TypeError if one is not."""

    __slots__ = ()

    def named_tensors(self, prefix: str) -> dict[str, Tensor]:
        """Return every tensor by its name in the read set: `prefix`, then the names of the fields, joined by dots."""
        return {f"{prefix}.{name}": tensor for name, tensor, axes in _tensors(self) if not axes.is_view}

    def views(self: BuffersT, num_requests: int, **sizes: int) -> BuffersT:
        """Return the record of the first `num_requests` requests. Its tensors are views of the same memory.

        Args:
            sizes: the numbers of rows and columns in use, by the names in the fields' axes.
        """
        record: Any = self
        return replace(record, **_cut(self, num_requests, sizes))

    def by_request(self, num_requests: int) -> list[Tensor]:
        """Return a view [num_requests, rows, ...] of each tensor that has entries of requests and no others."""
        return [
            tensor.view(num_requests, tensor.shape[0] // num_requests, *tensor.shape[1:])
            for _, tensor, axes in _tensors(self)
            if axes.per_request and not axes.more
        ]


class TensorField(NamedTuple):
    """A field that holds a tensor, a mapping of tensors, or a record of tensors."""

    name: str
    axes: Axes
    holds: Literal["tensor", "mapping", "record"]


@cache
def tensor_fields(record: type[Any]) -> tuple[TensorField, ...]:
    """Return the fields of a record that hold tensors. Raises TypeError if a tensor's axes are not declared."""
    found: list[TensorField] = []
    for name, hint in get_type_hints(record, include_extras=True).items():
        kinds, said = list(_kinds(hint)), list(_said(hint))
        if get_origin(hint) is ClassVar or not any(kind is Tensor or _holds_tensors(kind) for kind in kinds):
            continue
        if Tensor in kinds and not said:
            raise TypeError(
                f"{record.__name__}.{name} does not say which axes of its tensor depend on the batch: annotate it as "
                "PerRequest, PerRow, or another of specgraph.buffers, or as Once"
            )
        origins = [get_origin(part) for part in _parts(hint)]
        is_mapping = any(isinstance(each, type) and issubclass(each, Mapping) for each in origins)
        holds = "record" if Tensor not in kinds else "mapping" if is_mapping else "tensor"
        found.append(TensorField(name, said[0] if said else Axes(), holds))
    return tuple(found)


def _parts(hint: Any) -> Iterator[Any]:
    """Yield an annotation and, recursively, its arguments."""
    yield hint
    for part in get_args(hint):
        yield from _parts(part)


def _kinds(hint: Any) -> Iterator[Any]:
    return (part for part in _parts(hint) if not get_args(part))


def _said(hint: Any) -> Iterator[Axes]:
    return (each for part in _parts(hint) for each in getattr(part, "__metadata__", ()) if isinstance(each, Axes))


@cache
def _holds_tensors(kind: Any) -> bool:
    """Return whether a class is a `Buffers`, or a named tuple with tensors."""
    if not isinstance(kind, type) or not hasattr(kind, "__annotations__"):
        return False
    if issubclass(kind, Buffers):
        return True
    return hasattr(kind, "_fields") and any(Tensor in _kinds(hint) for hint in get_type_hints(kind).values())


def _tensors(record: Any) -> Iterator[tuple[str, Tensor, Axes]]:
    """Yield (name, tensor, axes) for each tensor of a record and of the records in it."""
    for name, axes, holds in tensor_fields(type(record)):
        value = getattr(record, name)
        if value is None:
            continue
        if holds == "tensor":
            yield name, value, axes
        elif holds == "mapping":
            for key, tensor in value.items():
                yield f"{name}.{key}", tensor, axes
        elif not axes.is_view:
            for part, tensor, own in _tensors(value):
                yield f"{name}.{part}", tensor, own


def _cut(record: Any, num_requests: int, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return the fields of a record that depend on the batch, cut to its size."""
    cut: dict[str, Any] = {}
    for name, axes, holds in tensor_fields(type(record)):
        value = getattr(record, name)
        if value is None or not axes.per_request:
            continue
        if holds == "tensor":
            cut[name] = _view(value, axes, num_requests, sizes)
        else:
            of_record = {**sizes, "rows": sizes[axes.rows]} if axes.rows else sizes
            cut[name] = _views(value, num_requests, of_record)
    return cut


def _views(record: Any, num_requests: int, sizes: Mapping[str, int]) -> Any:
    """Return the views of a record that is a field of another one."""
    if isinstance(record, Buffers):
        return record.views(num_requests, **sizes)
    return record._replace(**_cut(record, num_requests, sizes))


def _view(tensor: Tensor, axes: Axes, num_requests: int, sizes: Mapping[str, int]) -> Tensor:
    entries = num_requests * (sizes[axes.rows] if axes.rows else 1) + axes.more
    if axes.is_packed:
        columns = sizes[axes.columns]
        return tensor.flatten(0, 1)[: entries * columns].view(entries, columns, *tensor.shape[2:])
    return tensor[:entries, : sizes[axes.columns]] if axes.columns else tensor[:entries]
