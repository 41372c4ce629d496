"""The work of a rendering, in units: the cost of each operation, computed before the operation makes its values."""

from __future__ import annotations

import re
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, Sized, ValuesView
from itertools import chain
from typing import Any

from jinja2 import TemplateRuntimeError
from jinja2.utils import Namespace

WORK = 1 << 28
"""The units that one rendering may spend. A conversation of a million characters takes about a tenth of them."""
STEP, CALL = 64, 256
"""Units of an operation, and of an operation that calls a function. A byte is one unit. STEP is also the cost of each
item that is made, and of each unit of a number that tells how many items to make."""
ITEM, _VISIT = 8, 64
"""Units of each item of a value that is read, and of each value visited while all the contents of a value are read."""
_DEPTH, _BITS = 100, 4096
"""The deepest nesting of lists and mappings, and the most bits of an integer."""

CONSTANT = frozenset({"length", "count", "first", "last", "default", "d", "attr", "random"})
"""Filters that don't read their value."""
SHALLOW = frozenset(
    {"list", "select", "reject", "selectattr", "rejectattr", "map", "batch", "slice", "reverse", "items", "groupby"}
)
"""Filters that read the items of their value, but not the items' contents."""
_ESCAPING = frozenset({"escape", "e", "forceescape", "urlencode", "tojson"})
"""Filters that may write six characters for one."""


class Work:
    """The work that a rendering may still do."""

    def __init__(self) -> None:
        self.left = WORK

    def spend(self, units: int) -> None:
        self.left -= max(units, 0)
        if self.left < 0:
            raise TemplateRuntimeError(f"it takes more than {WORK} steps and bytes: its loops or values are too large")

    def size(self, *values: Any) -> int:
        """Return the units of values with all their contents. Raises TemplateRuntimeError if more than is left."""
        total = 0
        open_: list[Iterator[Any]] = [iter(values)]
        while open_:
            for value in open_[-1]:
                total += _VISIT + own_size(value)
                if (inner := _items(value)) is not None:
                    open_.append(iter(inner))
                    break
            else:
                open_.pop()
            if total > self.left:
                self.spend(total)
            if len(open_) > _DEPTH:
                raise TemplateRuntimeError(f"it nests more than {_DEPTH} lists or mappings")
        return total


def own_size(value: Any) -> int:
    """Return the units of a value without the contents of its items."""
    if isinstance(value, str | bytes):
        return len(value) if isinstance(value, bytes) or value.isascii() else 4 * len(value)
    if isinstance(value, int):
        return value.bit_length() >> 3
    if isinstance(value, Namespace):
        raise TemplateRuntimeError("it uses a namespace as a value")
    if isinstance(value, Mapping | ItemsView):
        return 2 * ITEM * len(value)
    return ITEM * len(value) if isinstance(value, Sequence | KeysView | ValuesView) else 0


def _items(value: Any) -> Iterable[Any] | None:
    if isinstance(value, Mapping):
        return chain(value, value.values())
    plain = isinstance(value, str | bytes | range)
    return value if isinstance(value, Sequence | KeysView | ValuesView | ItemsView) and not plain else None


def _numbers(values: Iterable[Any]) -> int:
    """Return the sum of the absolute integers among arguments, a bound on the number of items that a call makes."""
    return sum(abs(value) for value in values if isinstance(value, int))


def _replaced(text: Any, arguments: Sequence[Any]) -> int:
    """Return the units that `replace` adds to a text."""
    if len(arguments) < 2 or not all(isinstance(each, str) for each in (text, *arguments[:2])):
        return 0
    return text.count(arguments[0]) * own_size(arguments[1])


def _widths(form: str, arguments: Iterable[Any], directive: str) -> int:
    """Return the units that a format adds to its values: widths, precisions, and values that it repeats."""
    found = re.findall(directive, form)
    digits = re.findall(r"\d+", " ".join(found))
    if any(len(each) > 9 for each in digits):
        raise TemplateRuntimeError(f"it formats with a width of {max(digits, key=len)[:20]}...")
    nested = _numbers(arguments) if any(each.endswith("{") or "*" in each for each in found) else 0
    return STEP * (sum(int(each) for each in digits) + len(found) * nested)


_PERCENT = r"%(?:\([^)]*\))?([^a-zA-Z%]*)"
_BRACES = r":[^{}]*\{?"


def operated(work: Work, operator: str, left: Any, right: Any) -> int:
    """Return the units of an operator's result, before it is computed."""
    if isinstance(left, int) and isinstance(right, int):
        bits = [left.bit_length(), right.bit_length()]
        most = {"*": sum(bits), "**": bits[0] * max(right, 0)}.get(operator, max(bits))
        if most > _BITS:
            raise TemplateRuntimeError(f"it computes a number of more than {_BITS} bits")
        return 0
    if operator == "%" and isinstance(left, str):
        values = right if isinstance(right, tuple) else (right,)
        return own_size(left) + left.count("%") * work.size(right) + _widths(left, values, _PERCENT)
    if operator == "*":
        times = _numbers((left, right))
        return (work.size(left, right) + 1) * times
    return own_size(left) + own_size(right)


def called(work: Work, owner: Any, name: str, arguments: Sequence[Any]) -> int:
    """Return the most units that a call can read or make."""
    given = work.size(*arguments)
    if isinstance(owner, Mapping):
        return given
    if not isinstance(owner, str | bytes | int | Sequence):
        return given
    size = work.size(owner)
    if name in ("translate", "striptags"):
        raise TemplateRuntimeError(f"it calls '{name}', which chat templates cannot use here")
    if name in ("format", "format_map") and isinstance(owner, str):
        return size + owner.count("{") * given + _widths(owner, arguments, _BRACES)
    if name == "replace":
        return size + given + _replaced(owner, arguments)
    if name == "join":
        return given + size * len(arguments[0]) if arguments else 0
    numbers = _numbers(arguments)
    return size + given + (size * numbers if name == "expandtabs" else STEP * numbers)


def filtered(work: Work, name: str, value: Any, arguments: Sequence[Any]) -> int:
    """Return the most units that a filter can read or make."""
    if name in CONSTANT:
        return 0
    if name in SHALLOW:
        return (STEP if isinstance(value, str) else 1) * own_size(value) + STEP * _numbers(arguments)
    size, given = work.size(value), work.size(*arguments)
    if name == "replace":
        return size + given + _replaced(value, arguments)
    if name == "join":
        return size + given * (1 + len(value) if isinstance(value, Sized) else 1)
    if name == "format":
        return size + str(value).count("%") * given + _widths(str(value), arguments, _PERCENT)
    numbers = _numbers(arguments)
    if name == "indent" or name in _ESCAPING:
        return (size * (6 if name in _ESCAPING else 1) + 1) * (1 + numbers + given)
    if name == "sum" and arguments:
        return size * (1 + len(value) if isinstance(value, Sized) else 1)
    return size + given + STEP * numbers
