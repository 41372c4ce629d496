"""Names of platforms as people give them, checked before torch is imported."""

from __future__ import annotations

import reprlib
from importlib.metadata import entry_points
from pathlib import Path

from specgraph.errors import UnknownPlatformError

ENTRY_POINT_GROUP = "specgraph.backends"
"""The group of the entry points of backends; an entry point has its platform's name."""
CHECKOUT = Path(__file__).parents[1]
"""The folder that holds `backends/NAME` if the core was installed from a checkout with `pip install -e`."""


def installed_backends() -> dict[str, str]:
    """Return the distribution of each installed backend by its platform's name; no backend is loaded."""
    entries = sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda each: each.name)
    return {each.name: each.dist.name if each.dist else "(no distribution)" for each in entries}


def check_platform(asked: str | None) -> str | None:
    """Return a platform's name, and its index if it has one, as they were given; None passes through.
    UnknownPlatformError where no such backend is installed, or the index is no number.
    """
    if asked is not None:
        name, _ = parse_platform(asked)
        if name not in (installed := installed_backends()):
            raise UnknownPlatformError(
                f"unknown platform {reprlib.repr(name)}; installed are {', '.join(installed)}{how_to_install(name)}"
            )
    return asked


def parse_platform(asked: str) -> tuple[str, int | None]:
    """Return the name and the index in NAME or NAME:INDEX; UnknownPlatformError where the index is no number."""
    name, _, index = asked.partition(":")
    if index and not (index.isdecimal() and len(index) < 10):
        raise UnknownPlatformError(
            f"platform {reprlib.repr(asked)}: the part after ':' must be a device index, as cpu:0"
        )
    return name, int(index) if index else None


def how_to_install(name: str) -> str:
    """Return a line that says how to install a backend of this checkout; empty where it has none of that name."""
    if not (name.isidentifier() and (CHECKOUT / "backends" / name / "pyproject.toml").exists()):
        return ""
    parts = f"-e . -e ./conformance -e ./backends/{name}"
    return f"\nThe backend '{name}' is in {CHECKOUT}, and not installed; there: pip install {parts}"
