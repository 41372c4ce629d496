"""Lists the kernels that device work makes Triton compile. The work's Python runs on meta tensors and launches nothing.

Only kernels of our ops are listed, not the kernels of a caller's own head or attention backend. The run ends before the
launch of such a kernel, when Python asks for a tensor's address, so later kernels are missing too. An extension in C++
is not stopped: like torch's own kernels, it must refuse tensors that are not on its device.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from triton.runtime import driver

from specgraph.dispatch_mode import DispatchMode
from specgraph.errors import first_line
from specgraph.kernels.compilation import Compilation, compilation_of
from specgraph.kernels.launch import Launcher
from specgraph.ops.library import NAMESPACE, declared

_log = logging.getLogger("specgraph")


def compilations(launchers: Iterable[Launcher], bodies: Iterable[Callable[[], None]]) -> list[Compilation]:
    """Return the kernels that device work makes Triton compile for the current device.

    Args:
        launchers: the device's launchers, see `launchers_of`.
        bodies: functions that can be captured: they read no value on the host, and keep no tensor that they make.
    """
    found: dict[Compilation, None] = {}
    recording = [recorded(each, found) for each in launchers]
    for body in bodies:
        try:
            with torch.no_grad(), _NoAddresses(), _Shapes(recording):
                body()
        except Exception as error:  # an op without a fake implementation, or a kernel of a caller's own
            _log.debug("not all kernels of a pass are compiled ahead: %s: %s", type(error).__name__, first_line(error))
    return list(found)


def recorded(launcher: Launcher, found: dict[Compilation, None]) -> Launcher:
    """Return a copy of the launcher that adds the compilation of each launch to `found` and launches nothing."""
    target = driver.active.get_current_target()

    def record(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        found[compilation_of(kernel, arguments, options, target)] = None

    return replace(launcher, record=record)


class _NoAddresses(TorchFunctionMode):
    """Raises RuntimeError if a kernel outside our ops asks a meta tensor for its address. It acts in one thread."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.data_ptr and args[0].is_meta:
            raise RuntimeError("a kernel that is none of our ops asks for an address")
        return func(*args, **(kwargs or {}))


class _Shapes(DispatchMode):
    """Within the mode, ops take and return meta tensors, and our own ops run the Python of their launches."""

    def __init__(self, launchers: Sequence[Launcher]) -> None:
        super().__init__()
        self.launchers = launchers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(_without_memory, (args, kwargs or {}))
        name = func.__name__.partition(".")[0]
        launcher = next((each for each in self.launchers if hasattr(each, name)), None)
        if func.namespace == NAMESPACE and launcher is not None:
            op = declared()[name]
            # The op may call ops with launches of their own. Alignment is read from addresses.
            with self, torch._C.DisableTorchFunction():
                result = op.parameters.with_records(getattr(launcher, name))(*args, **kwargs)
                return op.parameters.with_records(op.reference)(*args, **kwargs) if result is NotImplemented else result
        # Most ops of a pass are linear or add. torch's own fakes would import its compiler, which takes seconds.
        if func is torch.ops.aten.linear.default:
            return args[0].new_empty(*args[0].shape[:-1], args[1].shape[0])
        if func is torch.ops.aten.add.Tensor and _alike(*args):
            return args[0].new_empty(args[0].shape)
        return func(*args, **kwargs)


def _alike(x: Any, y: Any) -> bool:
    return isinstance(y, Tensor) and (x.shape, x.dtype) == (y.shape, y.dtype)


def _without_memory(value: Any) -> Any:
    """Map a tensor to a meta tensor of its shape, strides and alignment, and a device to the meta device."""
    if isinstance(value, torch.device):
        return torch.device("meta")
    if not isinstance(value, Tensor) or value.is_meta:
        return value
    offset = value.data_ptr() % 16 // value.itemsize
    return torch.empty(0, dtype=value.dtype, device="meta").as_strided(value.shape, value.stride(), offset)
