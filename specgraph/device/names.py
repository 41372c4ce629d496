"""Names of platforms, devices and dtypes as people give them; one that is wrong is refused before torch is imported."""

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
"""The group of the entry points of backends; an entry point has its platform's name."""
CHECKOUT = Path(__file__).parents[2]
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
    parts = f"-e . -e ./models -e ./run -e ./conformance -e ./backends/{name}"
    return f"\nThe backend '{name}' is in {CHECKOUT}, and not installed; there: pip install {parts}"


def device_named(device: torch.device | str) -> torch.device:
    """Return the torch device of that name; ConfigError where this machine has none."""
    import torch

    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"no device {shown(str(device))}: {first_line(error)}") from None


def dtype_named(dtype: DType) -> torch.dtype | None:
    """Return the torch dtype of that name; a dtype and None pass through. ConfigError for one that no model runs in."""
    unknown = ConfigError(f"unknown dtype {shown(dtype)}; there are {', '.join(DTYPES)}")
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise unknown  # before torch is imported, which takes long
    import torch

    if dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1):
        return dtype
    if not isinstance(dtype, str):
        raise unknown
    return getattr(torch, dtype)
