"""The bugs of the field, put back on purpose: each replaces functions of the core by broken ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

import pytest
from mutants.hazards import hazard_of


@dataclass(frozen=True, slots=True)
class Mutant:
    """One bug."""

    name: str
    """The hazard's name, with a dash and more words if the hazard has several mutants."""
    bug: str
    """The sentence that says what is broken."""
    apply: Callable[[pytest.MonkeyPatch], None]
    hazard: str
    """The row of the hazard table: a case of this hazard must fail the mutant."""


MUTANTS: dict[str, Mutant] = {}


def replace_function(patch: pytest.MonkeyPatch, place: str, broken: Callable[..., Any]) -> None:
    """Replace a function of specgraph, at `module:name` or `module:Class.name`, by `broken(real, *args, **options)`.

    A property at the place becomes one that calls `broken(real, self)`.
    """
    module, _, path = place.partition(":")
    owner_path, _, name = path.rpartition(".")
    owner = resolve_name(f"{module}:{owner_path}")
    real = getattr(owner, name)

    def replaced(*args: Any, **options: Any) -> Any:
        return broken(real, *args, **options)

    vars(replaced).update(on=lambda device: replaced, reference=getattr(real, "reference", None))  # of ops, see `Op`
    patch.setattr(owner, name, property(replaced) if isinstance(real, property) else replaced)


def mutant(name: str, *places: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a mutant; the docstring is its bug.

    The decorated function takes the place of the one at each of `places`, and is given the real one first. Without a
    place it is called with a `MonkeyPatch` and puts the bug in by itself.
    """

    def register(broken: Callable[..., Any]) -> Callable[..., Any]:
        def apply(patch: pytest.MonkeyPatch) -> None:
            for place in places:
                replace_function(patch, place, broken)

        assert name not in MUTANTS, f"two mutants are named '{name}'"
        bug = " ".join((broken.__doc__ or "").split())
        MUTANTS[name] = Mutant(name, bug, apply if places else broken, hazard_of(name))
        return broken

    return register
