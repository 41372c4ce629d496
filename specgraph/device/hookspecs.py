"""The one hook that a backend implements.

A backend is a distribution with an entry point in the group `specgraph.backends`. The entry point names a module with

    from specgraph.device import Backend, hookimpl

    @hookimpl
    def specgraph_backend() -> Backend: ...

Importing the module must not need the vendor's package and must not touch a device: `Backend.probe` and `Backend.open`
may do both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pluggy

from specgraph.device.interface import Platform

PROJECT = "specgraph"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True, slots=True)
class Probe:
    """A backend's findings on this machine. If it is not available, `reason` says why, and how to change that.

    If it is available, `reason` is empty, or a remark about the installation that `specgraph platforms` shows.
    """

    available: bool
    reason: str = ""
    device_count: int = 0
    versions: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A platform that can be opened. `probe` should return within a second and raise nothing."""

    name: str
    probe: Callable[[], Probe]
    open: Callable[[int], Platform]
    """Opens the device with that index, or raises PlatformError."""
    api: int
    """The PLATFORM_API that the backend was written for, as a literal number. A core with another PLATFORM_API then
    refuses the backend in one line."""
    accelerator: bool = True
    """True if automatic selection may take this platform. It does if no other accelerator is available."""
    supersedes: frozenset[str] = frozenset()
    """Names of other platforms under which this device may also appear, through a compatibility layer for another
    vendor's API. Automatic selection ignores them if this platform is available; selection by name does not."""


@hookspec(firstresult=True)
def specgraph_backend() -> Backend | None:
    """Return this plugin's backend."""
