"""The core's Triton kernels on this device."""

# pyright: reportMissingImports=false
from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from specgraph.errors import first_line

if TYPE_CHECKING:
    from specgraph.kernels.launch import LaunchOptions

    from specgraph_musa.platform import MusaPlatform


def why_absent(platform: MusaPlatform) -> str | None:
    """Return why Triton can't compile for the platform's tensors, or None. Runs no kernel.

    It compares Triton's target, because the driver package of the vendor's Triton has had several names (mtgpu, musa,
    mthreads).
    """
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: install Moore Threads' build of it"
    try:
        from triton.runtime import driver

        target = driver.active.get_current_target().backend
    except Exception as error:
        return f"triton is installed and finds no device: {first_line(error)}"
    if target != platform.device.type:
        return f"this triton compiles for '{target}', and the tensors are on '{platform.device.type}'"
    return None


def launch_options(platform: MusaPlatform) -> LaunchOptions:
    """Return launch options with the default tiles: none were tuned, since no MUSA device was available."""
    from specgraph.kernels.launch import LaunchOptions

    return LaunchOptions(compute_units=int(platform.musa.get_device_properties(platform.index).multi_processor_count))


def register_ops(platform: MusaPlatform) -> None:
    """Register the kernels under the dispatch key of the platform's tensors. Later calls change nothing."""
    from specgraph.kernels.implement import register
    from specgraph.ops.library import dispatch_key_of

    from specgraph_musa.packed_rows import with_packed_rows

    register(dispatch_key_of(platform.device), launch_options(platform), around=with_packed_rows)


def agree_with_reference(platform: MusaPlatform) -> str | None:
    """Run the core's trial of its Triton kernels on this device. Return the error found, or None."""
    if (absent := why_absent(platform)) is not None:
        return absent
    from specgraph.kernels.implement import agree_with_references

    return agree_with_references(launch_options(platform), platform.device)
