"""The bugs of the field, put back on purpose: one function a hazard, which patches the smallest part that shows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

Apply = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One bug."""

    name: str
    """The hazard's name, with a dash and more words if the hazard has several mutants."""
    part: str
    """platform, attention, kernel, model, or engine."""
    bug: str
    """What is broken, in one sentence."""
    apply: Apply
    hazard: str
    """The row of the hazard table: a case of this hazard must fail the mutant."""


MUTANTS: dict[str, Mutant] = {}


def mutant(name: str, part: str, hazard: str = "") -> Callable[[Apply], Apply]:
    """Register a mutant of the hazard of the same name, unless `hazard` is given; the docstring is its bug."""

    def register(apply: Apply) -> Apply:
        assert name not in MUTANTS, f"two mutants are named '{name}'"
        MUTANTS[name] = Mutant(name, part, " ".join((apply.__doc__ or "").split()), apply, hazard or name)
        return apply

    return register
