"""Known gaps of a backend, declared in its own distribution: `xfails.toml` beside the module of its entry point.

    [[xfail]]
    case = "replay.random-numbers-advance"     # one case; without [parameters]: all of its parameter sets
    owner = "vendor"                           # who must fix it
    reason = "the generator's offset is baked"
    link = "https://..."
    when = "no aclrtValueWait"                 # optional: only if a capability's reason has these words

The file is strict: a declared case that passes fails the run, and so does an entry that matches no case.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specgraph.device.discovery import ENTRY_POINT_GROUP
from specgraph.errors import ConfigError

if TYPE_CHECKING:
    from specgraph.device import Discovered, Support

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]

FILE_NAME = "xfails.toml"
_KEYS = ("case", "owner", "reason", "link")
_OPTIONAL = ("when",)


@dataclass(frozen=True, slots=True)
class Xfail:
    """One declared gap."""

    case: str
    owner: str
    reason: str
    link: str
    when: str = ""
    """Words in the reason of one of the platform's capabilities. They limit the gap to some devices, drivers or
    runtimes."""

    @property
    def text(self) -> str:
        """The reason with the owner and the link."""
        return f"{self.reason} ({self.owner}) {self.link}"

    def applies(self, supports: Mapping[str, Support]) -> bool:
        """Return True if the gap is expected on a platform with these capabilities."""
        return any(self.when in support.reason for support in supports.values())

    def matches(self, case_id: str) -> bool:
        """Return True if `case_id` is this case or one of its parameter sets."""
        return case_id == self.case or case_id.partition("[")[0] == self.case


def entry_module(item: Discovered) -> str | None:
    """Return the module of a backend's entry point."""
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        if entry.dist is not None and entry.dist.name == item.distribution and entry.name == item.name:
            return entry.module
    return None


def find_xfails(item: Discovered) -> Path | None:
    """Return the backend's xfails.toml, in the folder of its entry point's module. None if there is none."""
    module = entry_module(item)
    spec = None if module is None else find_spec(module)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / FILE_NAME
    return path if path.is_file() else None


def read_xfails(path: Path) -> tuple[Xfail, ...]:
    """Return the declared gaps of a file.

    Raises:
        ConfigError: the file can't be read or isn't TOML, or an entry lacks a key. The message names file and entry.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not a readable TOML file: {error}") from error
    entries = data.pop("xfail", [])
    if data or not isinstance(entries, list):
        raise ConfigError(f"{path}: expected nothing but [[xfail]] tables with {', '.join(_KEYS)}")
    return tuple(_entry(path, number, entry) for number, entry in enumerate(entries, start=1))


def _entry(path: Path, number: int, entry: Any) -> Xfail:
    keys: set[Any] = set(entry) - set(_OPTIONAL) if isinstance(entry, dict) else set()
    if keys != set(_KEYS) or not all(isinstance(v, str) for v in entry.values()):
        raise ConfigError(f"{path}: entry {number} must have the strings {', '.join(_KEYS)}, got {entry!r}")
    if not entry["case"] or not entry["reason"] or not entry["owner"]:
        raise ConfigError(f"{path}: entry {number} has an empty case, owner or reason")
    return Xfail(**entry)
