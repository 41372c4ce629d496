"""The one hook that a backend implements, and the search for backends by their entry points.

A backend is a distribution with an entry point in the group `specgraph.backends`. The entry point names a module with

    from specgraph.device import Backend, hookimpl

    @hookimpl
    def specgraph_backend() -> Backend: ...

Importing the module must not need the vendor's package and must not touch a device: `Backend.probe` and `Backend.open`
may do both.

Each plugin is loaded in its own `try`. A plugin that fails is listed with the reason, and does not hide the others:
pluggy's `load_setuptools_entrypoints` would stop at the first one that raises.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType

import pluggy

from specgraph.device.interface import PLATFORM_API, Platform
from specgraph.errors import PlatformError

ENTRY_POINT_GROUP = "specgraph.backends"
"""The entry point group of backends. Each entry point has its platform's name."""


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
    """The newest PLATFORM_API that the backend was written for, as a literal number. A core with a newer one refuses
    the backend in one line, and so does a core below `oldest_api`."""
    accelerator: bool = True
    """True if automatic selection may take this platform. It does if no other accelerator is available."""
    supersedes: frozenset[str] = frozenset()
    """Names of other platforms under which this device may also appear, through a compatibility layer for another
    vendor's API. Automatic selection ignores them if this platform is available; selection by name does not."""
    oldest_api: int | None = None
    """The lowest PLATFORM_API that the backend works with. None if it works with `api` alone."""


@hookspec(firstresult=True)
def specgraph_backend() -> Backend | None:
    """Return this plugin's backend."""


@dataclass(frozen=True, slots=True)
class Discovered:
    """One entry point: its backend, or the reason why there is none."""

    name: str
    distribution: str
    version: str
    backend: Backend | None
    reason: str = ""

    def probe(self) -> Probe:
        """Return the backend's probe of this machine. Never raises: an exception becomes its `reason`."""
        if self.backend is None:
            return Probe(available=False, reason=self.reason)
        try:
            return self.backend.probe()
        except Exception as error:
            return Probe(available=False, reason=f"its probe raised {type(error).__name__}: {error}")


def discover(entries: Iterable[EntryPoint] | None = None) -> MappingProxyType[str, Discovered]:
    """Load the backend of each entry point, and return them by their platform's name.

    The default of `entries` is every installed entry point of the group `specgraph.backends`. Raises PlatformError if
    two distributions offer platforms of the same name.
    """
    found: dict[str, Discovered] = {}
    for entry in sorted(entry_points(group=ENTRY_POINT_GROUP) if entries is None else entries, key=lambda e: e.name):
        item = _load(entry)
        if (other := found.get(item.name)) is not None:
            if other.distribution == item.distribution:
                continue  # the same distribution twice on sys.path: an editable install, and its source folder
            raise PlatformError(
                f"two backends are named '{item.name}': {other.distribution} {other.version} and "
                f"{item.distribution} {item.version}. Uninstall one of them."
            )
        found[item.name] = item
    return MappingProxyType(found)


def _load(entry: EntryPoint) -> Discovered:
    dist = entry.dist
    distribution, version = (dist.name, dist.version) if dist is not None else ("(no distribution)", "")
    try:
        backend = _ask(entry)
    except Exception as error:
        reason = f"its plugin {entry.value} failed to load: {type(error).__name__}: {error}"
        return Discovered(entry.name, distribution, version, None, reason)
    oldest = backend.api if backend.oldest_api is None else backend.oldest_api
    if not oldest <= PLATFORM_API <= backend.api:
        spoken = f"{oldest} to {backend.api}" if oldest < backend.api else f"{backend.api}"
        reason = (
            f"{distribution} {version} speaks platform API {spoken}, this specgraph speaks {PLATFORM_API}: "
            f"upgrade {'specgraph-core' if oldest > PLATFORM_API else distribution}"
        )
        return Discovered(entry.name, distribution, version, None, reason)
    return Discovered(backend.name, distribution, version, backend)


def _ask(entry: EntryPoint) -> Backend:
    """Call the hook of one plugin."""
    plugins = pluggy.PluginManager(PROJECT)
    plugins.add_hookspecs(sys.modules[__name__])
    plugins.register(entry.load(), name=entry.name)
    plugins.check_pending()  # a misspelt hook is an error, not a plugin that does nothing
    backend = plugins.hook.specgraph_backend()
    if not isinstance(backend, Backend):
        raise PlatformError(f"hook specgraph_backend returned {backend!r}, not a Backend")
    return backend
