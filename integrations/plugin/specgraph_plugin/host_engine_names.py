"""Compares the names that a plugin uses with the installed host engine, at start-up. It looks at no version."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from inspect import signature
from typing import Any


def parameters(function: Any) -> tuple[str, ...]:
    """Return the names of a function's parameters, without `self`."""
    return tuple(name for name in signature(function).parameters if name != "self")


def other_parameters(owner: Any, wanted: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a line per function of a class or module that is missing, or has other first parameters than `wanted`."""
    found: list[str] = []
    for name, first in wanted.items():
        function = getattr(owner, name, None)
        if function is None:
            found.append(f"{owner.__name__}.{name} is missing")
        elif (given := parameters(function))[: len(first)] != tuple(first):
            found.append(f"{owner.__name__}.{name} takes ({', '.join(given)}), expected ({', '.join(first)}, ...)")
    return found


def missing_members(owner: Any, wanted: Iterable[str]) -> list[str]:
    """Return a line for each name that is no attribute and no annotated field of an object or class."""
    kind = owner if isinstance(owner, type) else type(owner)
    fields = {name for base in kind.__mro__ for name in getattr(base, "__annotations__", ())}
    return [f"{kind.__name__}.{name} is missing" for name in wanted if name not in fields and not hasattr(owner, name)]
