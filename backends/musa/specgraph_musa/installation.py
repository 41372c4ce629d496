"""Whether torch_musa is installed, fits its torch and sees a device; if not, what to do, in one line each."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from specgraph.platforms import Probe

OLDEST_TORCH = (2, 11)

HOW_TO_INSTALL = (
    "install the MUSA driver and toolkit, then torch and torch_musa of one release, both from Moore Threads "
    "(https://github.com/MooreThreads/torch_musa). They are not on PyPI, and the vendor's index reuses the names "
    "'torch' and 'triton': give pip that index alone (--index-url), never merged with PyPI's (--extra-index-url), or "
    "it may mix the two"
)


def probe(
    load: Callable[[str], Any] = import_module,
    torch_version: str = torch.__version__,
    installed_version: Callable[[], str | None] | None = None,
) -> Probe:
    """What answers on this machine. Imports torch_musa; raises nothing.

    Args:
        load, torch_version, installed_version: where the answers come from, for tests.
    """
    versions = {"torch": torch_version}
    if _release(torch_version) < OLDEST_TORCH:
        return _no(
            f"torch {torch_version} is older than {'.'.join(map(str, OLDEST_TORCH))}, which specgraph needs: install a "
            "newer torch and torch_musa of one release from Moore Threads",
            versions,
        )
    found = (installed_version or _installed_version)()
    if found is not None:
        versions["torch_musa"] = found
        if (wrong := _wrong_torch(found, torch_version)) is not None:
            return _no(wrong, versions)
    try:
        package = load("torch_musa")
    except ModuleNotFoundError as error:
        if error.name != "torch_musa":
            return _no(f"torch_musa needs the module '{error.name}', which is missing: {HOW_TO_INSTALL}", versions)
        return _no(f"torch_musa is not installed: {HOW_TO_INSTALL}", versions)
    except Exception as error:
        return _no(_unloadable(error, torch_version), versions)
    versions["torch_musa"] = str(getattr(package, "__version__", "unknown"))
    if (wrong := _wrong_torch(versions["torch_musa"], torch_version)) is not None:
        return _no(wrong, versions)
    try:
        count = int(package.device_count()) if package.is_available() else 0
    except Exception as error:
        return _no(f"torch_musa is installed, and its runtime fails: {_first_line(error)}. Check musaInfo", versions)
    if count == 0:
        return _no(
            "torch_musa is installed and sees no device: check the driver (musaInfo, /dev/mtgpu*), and that "
            "MUSA_VISIBLE_DEVICES, read once at start, names one",
            versions,
        )
    return Probe(available=True, device_count=count, versions=versions)


def _wrong_torch(torch_musa_version: str, torch_version: str) -> str | None:
    """torch_musa's binary fits the torch of its own release only."""
    if _release(torch_musa_version) in (_release(torch_version), ()):
        return None
    return (
        f"torch_musa {torch_musa_version} does not fit torch {torch_version}: its binary is built for the torch of its "
        f"own release. Install torch and torch_musa of one release from Moore Threads"
    )


def _unloadable(error: BaseException, torch_version: str) -> str:
    """torch_musa says little when its binary fails to load; the reason is in what caused it."""
    causes: list[str] = []
    seen: BaseException | None = error
    while seen is not None and len(causes) < 4:
        causes.append(_first_line(seen))
        seen = seen.__cause__ or seen.__context__
    text = "; ".join(dict.fromkeys(causes))
    if "undefined symbol" in text:
        return (
            f"torch_musa does not load into torch {torch_version} ({text}): it needs the torch that Moore Threads "
            f"patches and builds with it, and another one is installed. {HOW_TO_INSTALL[0].upper()}{HOW_TO_INSTALL[1:]}"
        )
    if "cannot open shared object file" in text:
        return (
            f"torch_musa does not load ({text}): a library of the MUSA toolkit is not found. Install the toolkit, and "
            "put its lib folder (/usr/local/musa/lib) on LD_LIBRARY_PATH"
        )
    return f"torch_musa does not load: {text}"


def _installed_version() -> str | None:
    try:
        return version("torch_musa")
    except PackageNotFoundError:
        return None


def _release(text: str) -> tuple[int, ...]:
    """(major, minor), or () where the text has none."""
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else ()


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _no(reason: str, versions: dict[str, str]) -> Probe:
    return Probe(available=False, reason=reason, versions=versions)
