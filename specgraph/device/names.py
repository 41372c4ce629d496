"""The names of platforms, devices and dtypes that users give. A wrong platform or dtype is refused before torch is
imported."""

from __future__ import annotations

import reprlib
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from specgraph.errors import ConfigError, UnknownPlatformError, first_line
from specgraph.validation import shown

if TYPE_CHECKING:
    import torch

    DType = torch.dtype | str | None
else:
    DType = object  # `dtype_named` checks it, once torch is loaded

DTYPES = ("float32", "float16", "bfloat16")

ENTRY_POINT_GROUP = "specgraph.backends"
"""The entry point group of backends. Each entry point has its platform's name."""
CHECKOUT = Path(__file__).parents[2]
"""The folder that holds `backends/NAME` if the core was installed from a checkout with `pip install -e`."""


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


def device_named(device: torch.device | str) -> torch.device:
    """Return the torch device of that name. Raises ConfigError if this machine does not have it."""
    import torch

    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"no device {shown(str(device))}: {first_line(error)}") from None


def dtype_named(dtype: DType) -> torch.dtype | None:
    """Return the torch dtype of that name. A dtype and None pass through.

    Raises:
        ConfigError: there is no such dtype, or no model runs in it.
    """
    unknown = ConfigError(f"unknown dtype {shown(dtype)}; there are {', '.join(DTYPES)}")
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise unknown  # before torch is imported, which takes long
    import torch

    if dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1):
        return dtype
    if not isinstance(dtype, str):
        raise unknown
    return getattr(torch, dtype)
