"""The one hook that a backend implements.

A backend is a distribution with an entry point in the group `specgraph.backends`; the module it names has

    from specgraph.platforms import Backend, hookimpl

    @hookimpl
    def specgraph_backend() -> Backend: ...

The module must import without the vendor's package: only `Backend.probe` and `Backend.open` may import it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pluggy

from specgraph.platforms.interface import PLATFORM_API, Platform

ENTRY_POINT_GROUP = "specgraph.backends"
PROJECT = "specgraph"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True, slots=True)
class Probe:
    """What a backend found on this machine. `reason` says why it is not available and how to change that."""

    available: bool
    reason: str = ""
    device_count: int = 0
    versions: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A platform that can be opened. `probe` answers within a second, imports lazily and raises nothing."""

    name: str
    probe: Callable[[], Probe]
    open: Callable[[int], Platform]
    """Opens the device of that index; raises PlatformError when it can't."""
    accelerator: bool = True
    """Accelerators are selected by themselves when exactly one answers; others only by name."""
    supersedes: frozenset[str] = frozenset()
    """Names of accelerators that seem to answer where this one does: a compatibility layer may present this device
    under another vendor's API. They are passed over when an accelerator is selected by itself, never by name."""
    api: int = PLATFORM_API


@hookspec(firstresult=True)
def specgraph_backend() -> Backend | None:
    """Return this plugin's backend."""
