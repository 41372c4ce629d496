"""The bugs of the field, put back on purpose: one function a hazard, which patches the smallest part that shows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

Apply = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One bug. Its name is the hazard's."""

    name: str
    part: str
    """platform, attention, or engine."""
    bug: str
    """What is broken, in one sentence."""
    apply: Apply


MUTANTS: dict[str, Mutant] = {}


def mutant(name: str, part: str) -> Callable[[Apply], Apply]:
    """Register a mutant; the docstring is its bug."""

    def register(apply: Apply) -> Apply:
        assert name not in MUTANTS, f"two mutants are named '{name}'"
        MUTANTS[name] = Mutant(name, part, " ".join((apply.__doc__ or "").split()), apply)
        return apply

    return register
