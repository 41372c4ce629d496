"""Installed versions, and the functions that a vendor's module is missing."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from typing import Any

Calls = Mapping[str, "tuple[str, ...] | None"]
"""Name in a module -> the arguments of its call: `word` is positional, `word=` a keyword. None for a property."""


def installed_version(distribution: str) -> str:
    """Return the version of an installed distribution, without importing it. Empty if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def calls_of(table: str) -> Calls:
    """Read a table of calls: `device_count() Event.record(self,stream) Event(enable_timing=) Stream.stream_id`."""
    entries = (entry.rstrip(")").partition("(") for entry in table.split())
    return {name: tuple(filter(None, given.split(","))) if bracket else None for name, bracket, given in entries}


def missing_names(module: Any, calls: Calls) -> list[str]:
    """List the names in `calls` that a module does not have, and the calls that its signatures refuse.

    A signature that Python can't read (of a function in a binary module) counts as fitting.
    """
    return [name + wrong for name in calls if (wrong := _mismatch(module, name, calls[name])) is not None]


def _mismatch(module: Any, name: str, arguments: tuple[str, ...] | None) -> str | None:
    """Return the text that follows `name` in the list of missing names. None if the name and its call fit."""
    try:
        found = attrgetter(name)(module)
    except AttributeError:
        return ""
    if arguments is None:
        return None
    if inspect.isclass(found):
        found = found.__init__ if found.__new__ is object.__new__ else found.__new__
        arguments = ("self", *arguments)
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*(a for a in arguments if a[-1] != "="), **{a[:-1]: None for a in arguments if a[-1] == "="})
    except TypeError:
        return f"({', '.join(a for a in arguments if a != 'self')}), which is {signature} here"
    return None
