"""The names of devices and dtypes that users give. A wrong dtype is refused before torch is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specgraph.errors import ConfigError, first_line
from specgraph.validation import shown

if TYPE_CHECKING:
    import torch

    DType = torch.dtype | str | None
else:
    DType = object  # `dtype_named` checks it, once torch is loaded

DTYPES = ("float32", "float16", "bfloat16")


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
