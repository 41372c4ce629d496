"""The one hook that a backend implements.

A backend is a distribution with an entry point in the group `specgraph.backends`; the module it names has

    from specgraph.device import Backend, hookimpl

    @hookimpl
    def specgraph_backend() -> Backend: ...

The module must import without the vendor's package and must touch no device: `Backend.probe` and `Backend.open` do.
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
    """The answer of a backend about this machine. `reason` says why it is not available and how to change that."""

    available: bool
    reason: str = ""
    device_count: int = 0
    versions: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A platform that can be opened. `probe` should answer within a second and raise nothing."""

    name: str
    probe: Callable[[], Probe]
    open: Callable[[int], Platform]
    """Opens the device of that index, or raises PlatformError."""
    api: int
    """The PLATFORM_API that the backend was written for, as a number: a later core then refuses it in one line."""
    accelerator: bool = True
    """An accelerator is selected when it is the only one that is available; other platforms only by name."""
    supersedes: frozenset[str] = frozenset()
    """Names of platforms under which this device may also appear, through a compatibility layer of another vendor's
    API. Automatic selection passes them over; selection by name does not."""


@hookspec(firstresult=True)
def specgraph_backend() -> Backend | None:
    """Return this plugin's backend."""
