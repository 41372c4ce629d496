"""Every exception that the core raises on purpose.

Each message names the request, the actual state, and the remedy. Catch `SpecgraphError` to catch all of them.
"""

from __future__ import annotations

__all__ = [
    "CapacityError",
    "CaptureError",
    "ConfigError",
    "HostReadError",
    "OrderError",
    "PlatformError",
    "RankError",
    "ReadSetError",
    "SpecgraphError",
    "StaleInputError",
    "UnknownPlatformError",
    "UnsupportedError",
    "UpdateError",
]


class SpecgraphError(Exception):
    """Base of all errors raised by specgraph."""

    exit_status = 1
    """The exit status of a command that ends with this error."""


class ConfigError(SpecgraphError, ValueError):
    """The caller gave something that does not fit: an option, a head, a batch, or a call of a closed object.

    Checks raise it before the work that was asked for.
    """

    exit_status = 2


class PlatformError(SpecgraphError):
    """A platform is unknown, unavailable, or failed to load."""


class UnknownPlatformError(PlatformError, ConfigError):
    """No installed backend has the requested name, or the index after the name is no number."""


class UnsupportedError(SpecgraphError):
    """The platform lacks the requested capability; the message gives the reason."""


class CaptureError(SpecgraphError):
    """A graph could not be captured. The platform is usable again when this is raised."""


class HostReadError(CaptureError):
    """Captured code read a device value on the host."""


class ReadSetError(CaptureError):
    """Captured code touches a tensor that is not a weight, a KV cache or a named buffer."""


class StaleInputError(SpecgraphError):
    """A tensor that a captured graph reads was freed, moved, resized or rebound since capture."""


class OrderError(SpecgraphError):
    """Two streams use the same memory in no defined order, and at least one of them writes it."""


class UpdateError(SpecgraphError):
    """Host parameters of a captured graph were updated wrongly: missing, unknown or malformed values."""


class RankError(SpecgraphError):
    """The processes of one run disagree, or one of them ended or did not reach the others in time.

    Attributes:
        everywhere: True if every rank raises the same error.
    """

    def __init__(self, message: str, *, everywhere: bool = False) -> None:
        super().__init__(message)
        self.everywhere = everywhere


class CapacityError(SpecgraphError):
    """A request or batch does not fit: prompt too long, KV cache full, no captured size."""


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or its type's name if the message is empty."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
