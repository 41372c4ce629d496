"""The names that users give in options: of platforms, and of objects as MODULE:NAME.

A wrong platform is refused before torch is imported.
"""

from __future__ import annotations

import reprlib
import sys
from importlib.metadata import entry_points
from pkgutil import resolve_name
from typing import Any

from specgraph.device.discovery import ENTRY_POINT_GROUP
from specgraph.device.selection import how_to_install, parse_platform
from specgraph.errors import ConfigError, UnknownPlatformError


def installed_backends() -> dict[str, str]:
    """Return the distribution of each installed backend, by its platform's name. No backend is loaded."""
    entries = sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda each: each.name)
    return {each.name: each.dist.name if each.dist else "(no distribution)" for each in entries}


def check_platform(asked: str | None) -> str | None:
    """Check a platform given as NAME or NAME:INDEX, and return it unchanged. None passes through.

    Raises:
        UnknownPlatformError: no such backend is installed, or the index is no number.
    """
    if asked is not None:
        name, _ = parse_platform(asked)
        if name not in (installed := installed_backends()):
            raise UnknownPlatformError(
                f"unknown platform {reprlib.repr(name)}; installed are {', '.join(installed)}{how_to_install(name)}"
            )
    return asked


def import_named(place: str, asked: str = "") -> Any:
    """Return the object `place`, MODULE:NAME, also of a module in the current folder. Raises ConfigError if there is no
    such module or name; its text has `asked` instead of `place` if that is given.
    """
    sys.path.insert(0, "")
    try:
        return resolve_name(place)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{asked or place} can't be imported: {error}") from error
    finally:
        sys.path.remove("")
