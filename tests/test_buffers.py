"""Each field of each record of persistent tensors is named, cut to the batch and moved with its request."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, make_dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_type_hints

import pytest
import torch
from check_packages import typed_packages
from torch import Tensor

from specgraph.buffers import (
    ONCE,
    VIEW,
    Axes,
    Buffers,
    Once,
    PerDraft,
    PerRequest,
    PerRow,
    tensor_fields,
)

ROOT = Path(__file__).parents[1]
REQUESTS, LARGEST = 2, 3
ROWS = {"rows": 2, "drafts": 3}
MOST = 4
"""Rows per request, and columns, of the largest batch."""


def written_modules() -> Iterator[str]:
    """The modules of all distributions that could define a record: they say `Buffers`, the end of every record's name
    and of the base."""
    for mark in typed_packages(ROOT):
        for path in sorted(mark.parent.rglob("*.py")):
            if "Buffers" in path.read_text():
                yield ".".join(path.relative_to(mark.parents[1]).with_suffix("").parts).removesuffix(".__init__")


def subclasses(base: type[Any]) -> Iterator[type[Any]]:
    for each in base.__subclasses__():
        if getattr(sys.modules[each.__module__], each.__name__, None) is each:  # slots=True makes each class twice
            yield each
        yield from subclasses(each)


for module in written_modules():
    import_module(module)
RECORDS = sorted(filter(is_dataclass, set(subclasses(Buffers))), key=lambda record: record.__name__)


def made(record: type[Any]) -> Any:
    """One of a record for `LARGEST` requests; each tensor is full of numbers, [.., ..] as its axes say."""
    values: dict[str, Any] = dict.fromkeys(getattr(record, "_fields", None) or [f.name for f in fields(record)])
    hints = get_type_hints(record, include_extras=True)
    for name, axes, holds in tensor_fields(record):
        if holds == "record":
            kind = next(records_in(hints[name]))
            values[name] = made(kind if tensor_fields(kind) else next(subclasses(kind)))  # a base has no tensors
            continue
        entries = LARGEST * (MOST if axes.rows else 1) + axes.more
        tensor = torch.arange(entries * MOST * 2).view(entries, MOST, 2)
        values[name] = tensor if holds == "tensor" else {2: tensor}
    return record._make(values.values()) if issubclass(record, tuple) else record(**values)


def leaves(hint: Any) -> Iterator[Any]:
    parts = getattr(hint, "__args__", None)
    if not parts:
        yield hint
    for part in parts or ():
        yield from leaves(part)


def records_in(hint: Any) -> Iterator[type[Any]]:
    classes = [kind for kind in leaves(hint) if isinstance(kind, type)]
    return (kind for kind in classes if issubclass(kind, Buffers) or hasattr(kind, "_fields"))


def test_the_records_are_found():
    names = {record.__name__ for record in RECORDS}
    assert {
        "AttentionMetadata",
        "DraftBuffers",
        "PrefillBuffers",
        "ProposeBatch",
        "SharedBuffers",
        "VerifyBuffers",
    } <= names


@pytest.mark.parametrize("record", RECORDS)
def test_each_tensor_says_which_of_its_axes_depend_on_the_batch(record):
    assert tensor_fields(record)


@pytest.mark.parametrize("axes", [PerRequest, PerRow, PerDraft, Annotated[Tensor, Axes("rows", more=1)]])
@pytest.mark.parametrize("record", RECORDS)
def test_a_field_more_is_named_cut_to_the_batch_and_moved_with_its_request(record, axes):
    more: Any = make_dataclass("More", [("more", axes)], bases=(record,), frozen=True, kw_only=True)
    whole = made(more)
    assert whole.named_tensors("all")["all.more"] is whole.more
    own = axes.__metadata__[0]
    sizes = {name: ROWS.get(name, 2) for name in all_sizes(more)}
    views = whole.views(REQUESTS, **sizes)
    entries = REQUESTS * (ROWS["rows"] if own.rows else 1) + own.more
    columns = ROWS["drafts"] if own.columns else MOST
    assert torch.equal(views.more, whole.more[:entries, :columns])
    assert views.more.data_ptr() == whole.more.data_ptr()
    if not own.more:
        moved = views.by_request(REQUESTS)
        assert any(each.data_ptr() == views.more.data_ptr() and each.shape[0] == REQUESTS for each in moved)


def all_sizes(record: type[Any]) -> Iterator[str]:
    yield "rows"
    hints = get_type_hints(record, include_extras=True)
    for name, axes, holds in tensor_fields(record):
        yield from (size for size in (axes.rows, axes.columns) if size)
        for kind in records_in(hints[name]) if holds == "record" else ():
            yield from all_sizes(kind)


class Pair(NamedTuple):
    left: PerRequest
    right: PerRow


class Bare(NamedTuple):
    tensor: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Records(Buffers):
    pair: Annotated[Pair | None, Axes("later")]
    packed: Annotated[Tensor, Axes(columns="drafts", is_packed=True)]
    fixed: Once
    view: Annotated[Tensor, VIEW]
    by_length: Annotated[dict[int, Tensor], ONCE]
    absent: PerRequest | None = None
    count: int = 0


def test_records_in_records_packed_columns_views_and_what_is_the_same_for_every_batch():
    fixed, packed = torch.zeros(3), torch.arange(12).view(3, 4)
    pair = Pair(torch.zeros(3), torch.zeros(3 * 5))
    whole = Records(pair=pair, packed=packed, fixed=fixed, view=fixed, by_length={})
    views = whole.views(2, later=3, drafts=2)
    assert views.pair is not None
    assert (views.pair.left.shape, views.pair.right.shape) == ((2,), (6,))
    assert views.packed.tolist() == [[0, 1], [2, 3]]
    assert views.fixed is fixed
    assert views.view is fixed
    assert list(whole.named_tensors("a")) == ["a.pair.left", "a.pair.right", "a.packed", "a.fixed"]
    assert [tuple(each.shape) for each in views.by_request(2)] == [(2, 1), (2, 3), (2, 1, 2)]


@pytest.mark.parametrize("hint", [Tensor, Tensor | None, tuple[Tensor, ...], dict[str, Tensor]])
def test_a_bare_tensor_is_refused_by_name(hint):
    record = make_dataclass("Forgotten", [("left_out", hint)], bases=(Buffers,), frozen=True)
    with pytest.raises(TypeError, match=r"Forgotten\.left_out does not say which axes.*PerRequest, PerRow"):
        record(torch.zeros(1)).named_tensors("a")


def test_a_bare_tensor_in_a_named_tuple_is_refused_by_name():
    record = make_dataclass("Holds", [("part", Bare)], bases=(Buffers,), frozen=True)
    with pytest.raises(TypeError, match=r"Bare\.tensor does not say which axes"):
        record(Bare(torch.zeros(1))).views(1)
