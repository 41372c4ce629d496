"""A test of generators that no exception can mislead: whether one goes on, as the interpreter knows it."""

from __future__ import annotations

from collections.abc import Callable, Generator
from inspect import GEN_CLOSED, getgeneratorstate
from typing import Any

GeneratorRef = Callable[[], Generator[Any, Any, Any] | None]
"""A weak reference to a generator."""


def is_open(generator: GeneratorRef) -> bool:
    """Return True if a generator was not closed, and neither its end nor an exception has left it.

    A flag that its `finally` takes back is not as sure: Ctrl-C may come within the `finally`.
    """
    there = generator()
    return there is not None and getgeneratorstate(there) is not GEN_CLOSED
