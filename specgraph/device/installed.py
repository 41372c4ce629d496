"""Installed versions, what MODULE:NAME names, and what a vendor's module lacks of what a backend calls."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from pkgutil import resolve_name
from typing import Any

from specgraph.errors import ConfigError

Calls = Mapping[str, "tuple[str, ...] | None"]
"""Name below a module -> the arguments passed: `word` is positional, `word=` a keyword. None: a property."""


def installed_version(distribution: str) -> str:
    """Return the version of an installed distribution, read without importing it; empty if it is missing."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def import_named(place: str, asked: str = "") -> Any:
    """Return what MODULE:NAME names, in modules of the current folder too; ConfigError where there is no such module or
    name. Messages call it `asked`, by default `place`.
    """
    sys.path.insert(0, "")
    try:
        return resolve_name(place)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{asked or place} can't be imported: {error}") from error
    finally:
        sys.path.remove("")


def calls_of(table: str) -> Calls:
    """Read a table of calls: `device_count() Event.record(self,stream) Event(enable_timing=) Stream.stream_id`."""
    entries = (entry.rstrip(")").partition("(") for entry in table.split())
    return {name: tuple(filter(None, given.split(","))) if bracket else None for name, bracket, given in entries}


def missing_names(module: Any, calls: Calls) -> list[str]:
    """List what a module lacks of `calls`: names it does not have, and calls that its signatures refuse.

    Signatures that Python can't read (functions of a binary module) are taken to fit.
    """
    return [name + wrong for name in calls if (wrong := _mismatch(module, name, calls[name])) is not None]


def _mismatch(module: Any, name: str, arguments: tuple[str, ...] | None) -> str | None:
    """Return what to append to `name` in the list of missing names; None if it fits."""
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
