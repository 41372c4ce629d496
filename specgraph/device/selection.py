"""The choice of the platform to run on: the requested one, the only available accelerator, or the CPU."""

from __future__ import annotations

import logging
import os
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from specgraph.device.discovery import Discovered, discover
from specgraph.device.interface import Platform
from specgraph.errors import PlatformError, UnknownPlatformError
from specgraph.validation import check, checked, environment_number

ENV_VAR = "SPECGRAPH_PLATFORM"
FALLBACK = "cpu"
CHECKOUT = Path(__file__).parents[2]
"""The folder that holds `backends/NAME` if the core was installed from a checkout with `pip install -e`."""
WITHOUT_GRAPHS = frozenset({"mps"})
"""Types of torch devices without graphs, which therefore have no backend."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Selection:
    """The name of the chosen platform, and why it was chosen. It may not be available."""

    name: str
    index: int | None
    """The device's number. None if the caller named none; `open_platform` documents the default."""
    reason: str


def select_platform(asked: str | None, backends: Mapping[str, Discovered], environ: Mapping[str, str]) -> Selection:
    """Choose the platform for `open_platform`.

    Raises:
        PlatformError: several accelerators are available, or an index is no number.
    """
    asked = check("asked", asked, str | None)
    check("backends", backends, Mapping)
    check("environ", environ, Mapping)
    if asked:
        return Selection(*parse_platform(asked), "asked for by name")
    if variable := environ.get(ENV_VAR, "").strip():
        return Selection(*parse_platform(variable), f"{ENV_VAR}={variable}")
    if accelerator := _only_accelerator(backends):
        return Selection(accelerator, None, "the one accelerator that is available")
    if why := _torch_sees(backends):
        _log.warning("running on the '%s' platform, although %s", FALLBACK, why)
    else:
        _log.info("no accelerator is available; running on the '%s' platform", FALLBACK)
    return Selection(FALLBACK, None, "no accelerator is available")


@checked
def open_platform(
    name: str | None = None, *, found: Mapping[str, Discovered] | None = None, environ: Mapping[str, str] | None = None
) -> Platform:
    """Open the platform `name`. Without a name, open the first of: `SPECGRAPH_PLATFORM`, the only available
    accelerator, the CPU.

    Args:
        name: "name" or "name:index", as in the environment variable. Without an index, a process of torchrun takes
            device `LOCAL_RANK` if the machine has it. Otherwise it is the first device.
        found: the backends to choose from; all installed ones by default.
        environ: the environment variables; `os.environ` by default.

    Raises:
        PlatformError: the name is unknown or not available, several accelerators are available, or opening failed. If
            the platform is unknown or not available, the message lists every backend with its state.
    """
    backends = discover() if found is None else found
    variables = os.environ if environ is None else environ
    selected = select_platform(name, backends, variables)
    chosen, index = selected.name, selected.index
    item = backends.get(chosen)
    if item is None:
        raise UnknownPlatformError(
            f"unknown platform {reprlib.repr(chosen)}.\n{_listing(backends)}{how_to_install(chosen)}"
        )
    probe = item.probe()
    if not probe.available or item.backend is None:
        raise PlatformError(f"platform '{chosen}' is not available: {probe.reason}\n{_listing(backends)}")
    if index is None:
        local_rank = environment_number("LOCAL_RANK", 0, environ=variables)
        index = local_rank if local_rank < probe.device_count else 0
    if not 0 <= index < probe.device_count:
        raise PlatformError(f"platform '{chosen}' has {probe.device_count} device(s), index {index} was asked for")
    return item.backend.open(index)


def parse_platform(asked: str) -> tuple[str, int | None]:
    """Split NAME or NAME:INDEX into name and index. Raises UnknownPlatformError if the index is no number."""
    name, _, index = asked.partition(":")
    if index and not (index.isdecimal() and len(index) < 10):
        raise UnknownPlatformError(
            f"platform {reprlib.repr(asked)}: the part after ':' must be a device index, as cpu:0"
        )
    return name, int(index) if index else None


def how_to_install(name: str) -> str:
    """Return a line on how to install a backend from this checkout. Empty if it has no backend of that name."""
    if not (name.isidentifier() and (CHECKOUT / "backends" / name / "pyproject.toml").exists()):
        return ""
    parts = f"-e . -e ./models -e ./run -e ./conformance -e ./backends/{name}"
    return f"\nThe backend '{name}' is in {CHECKOUT}, and not installed; there: pip install {parts}"


def _only_accelerator(backends: Mapping[str, Discovered]) -> str | None:
    answering = {
        name: item.backend
        for name, item in backends.items()
        if item.backend and item.backend.accelerator and item.probe().available
    }
    imitated = frozenset[str]().union(*(backend.supersedes for backend in answering.values()))
    names = [name for name in answering if name not in imitated]
    if len(names) > 1:
        raise PlatformError(f"several accelerators are available: {', '.join(names)}. Choose one: {ENV_VAR}={names[0]}")
    return names[0] if names else None


def _torch_sees(backends: Mapping[str, Discovered]) -> str:
    """Say which accelerator torch sees, and why no backend serves it. Empty if torch sees none that has graphs."""
    import torch

    device = torch.accelerator.current_accelerator(True)
    if device is None or device.type in WITHOUT_GRAPHS:
        return ""
    why = "\nNo installed backend is for it: each is a distribution of its own, see Install in README.md"
    for name in (device.type, "accelerator"):
        if item := backends.get(name):
            why = f"\nThe backend '{name}' is not available: {item.probe().reason}"
            break
        if hint := how_to_install(name):
            why = hint
            break
    return f"torch sees a device '{device.type}'.{why}"


def _listing(backends: Mapping[str, Discovered]) -> str:
    lines = ["Installed platforms:"]
    for name, item in backends.items():
        probe = item.probe()
        state = "available" if probe.available else f"not available: {probe.reason}"
        lines.append(f"  {name} ({item.distribution} {item.version}): {state}")
    return "\n".join(lines)
