"""What a conformance case says about itself: the property it holds, the failure of the field it guards against."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

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
"""In the order in which an author gets them green: each stands on those before it."""

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Case:
    """One property of a backend. A parametrised test is one case a parameter set."""

    id: str
    """`group.name`, with `[parameters]` once collected."""
    property: str
    """What holds, in one sentence."""
    cause: str
    """Where to look first when it doesn't."""
    hazard: str | None = None
    """The row of the hazard table that it guards against."""
    needs: tuple[str, ...] = ()
    """Capabilities without which the property says nothing; the case is then listed as absent, with the reason."""
    quick: bool = False
    """Part of `--quick`."""
    timeout: float = 60.0
    """Seconds after which the case has failed."""

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
    quick: bool = False,
    timeout: float = 60.0,
) -> Callable[[Function], Function]:
    """Declare a test function as a conformance case; arguments as in `Case`."""
    declared = Case(id, property, cause, hazard, needs, quick, timeout)
    if declared.group not in GROUPS:
        raise ValueError(f"case '{id}': there is no group '{declared.group}'")
    return getattr(pytest.mark, MARKER)(declared)


class Absent(Exception):
    """Raised by a case that finds the platform without something that it needs; the message is the reason."""
