"""Tests whether a generator is still open, by the interpreter's own state: no exception can make that wrong."""

from __future__ import annotations

from collections.abc import Callable, Generator
from inspect import GEN_CLOSED, getgeneratorstate
from typing import Any

GeneratorRef = Callable[[], Generator[Any, Any, Any] | None]
"""A weak reference to a generator."""


def is_open(generator: GeneratorRef) -> bool:
    """Return True if a generator still exists, and has not returned, raised or been closed.

    A flag that the generator's `finally` resets is less reliable: Ctrl-C may come within the `finally`.
    """
    there = generator()
    return there is not None and getgeneratorstate(there) is not GEN_CLOSED
