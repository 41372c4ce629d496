"""The declaration of a conformance case: the property that it checks, and the known failure that it guards against."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
from specgraph.errors import ConfigError

MARKER = "specgraph_case"

GROUPS = (
    "discovery",
    "device",
    "streams",
    "capture",
    "replay",
    "task_update",
    "kernels",
    "attention",
    "drafting",
    "decoding",
    "faults",
    "collectives",
)
"""The groups, in the order in which a backend author makes them pass: cases build on properties that earlier groups
check."""

CORE_ATTENTION = ("paged", "paged-host")
"""The core's attention backends. Cases run with these and with the platform's own."""


def attention_place(word: str) -> str:
    """Return MODULE:FUNCTION of NAME=MODULE:FUNCTION.

    Raises:
        ConfigError: `word` has another form, or NAME is the name of one of the core's attention backends.
    """
    name, equals, place = word.partition("=")
    if not (name and equals and all(place.partition(":"))) or name in CORE_ATTENTION:
        raise ConfigError(
            f"attention '{word}' must be NAME=MODULE:FUNCTION, where FUNCTION(platform) makes an AttentionBackend "
            f"and NAME is none of the core's {', '.join(CORE_ATTENTION)}"
        )
    return place


Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Case:
    """One property of a backend. A parametrised test makes one case per parameter set."""

    id: str
    """`group.name`. Collection appends `[parameters]`."""
    property: str
    """The claim that the case checks: one sentence, true of a backend that passes."""
    cause: str
    """The place to look at first when the case fails."""
    hazard: str | None = None
    """The hazard that the case guards against: the name of its row in the hazard table."""
    needs: tuple[str, ...] = ()
    """Capabilities that the case requires. Without one of them the case is absent, with the capability's reason."""
    unless: tuple[str, ...] = ()
    """Capabilities that the platform must lack. With one of them the case is absent."""
    quick: bool = False
    """True if `--quick` runs the case."""
    timeout: float = 60.0
    """The seconds after which the case counts as failed on an idle machine; see `timeouts.py`."""

    @builtins.property
    def group(self) -> str:
        """The part of the id before the first dot."""
        return self.id.partition(".")[0]


def case(
    id: str,
    property: str,
    *,
    cause: str,
    hazard: str | None = None,
    needs: tuple[str, ...] = (),
    unless: tuple[str, ...] = (),
    quick: bool = False,
    timeout: float = 60.0,
) -> Callable[[Function], Function]:
    """Declare a test function as a conformance case. The arguments are the fields of `Case`."""
    declared = Case(id, property, cause, hazard, needs, unless, quick, timeout)
    if declared.group not in GROUPS:
        raise ValueError(f"case '{id}': there is no group '{declared.group}'")
    return getattr(pytest.mark, MARKER)(declared)


class Absent(Exception):
    """Raised by a case if the platform lacks something that the case requires. The message is the reason."""
