"""Refusals during a capture: ops that can't be captured, judged by their call alone, and host reads.

`.item()`, `bool(t)`, `nonzero` and boolean masks are dispatched, and therefore refused as ops. Other host reads of a
CPU tensor are not dispatched: only a torch function mode sees them.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode

from specgraph.cpu.ops import RESIZING
from specgraph.errors import CaptureError, HostReadError
from specgraph.user_code import TORCH, user_line

_aten = torch.ops.aten
_INDEX_PUT = (_aten.index_put_, _aten.index_put)
_COUNTED = (_aten.nonzero, _aten.masked_select)
"""Ops with a number of results that depends on values. Their fake implementations would refuse them too, but import
torch's compiler for it, which takes seconds."""

_READS: dict[Any, str] = {
    getattr(torch.Tensor, name): shown
    for name, shown in {
        "tolist": ".tolist()",
        "numpy": ".numpy()",
        "cpu": ".cpu()",
        "__array__": "numpy.asarray()",
        "__repr__": "printing (repr)",
        "__format__": "printing (format)",
        "__dlpack__": ".__dlpack__()",
        "__reduce_ex__": "pickling or copying",
        "__deepcopy__": "copy.deepcopy()",
    }.items()
    if hasattr(torch.Tensor, name)
}

_SPLITS = (torch.Tensor.tensor_split, torch.tensor_split)


def host_read_error(what: str) -> HostReadError:
    """Return the error of a host read; `what` is the op or the call."""
    if "_local_scalar_dense" in what:
        what = f"a branch, .item(), int() or index of Python's on a tensor ({what})"
    return HostReadError(
        f"{what} at {user_line()} reads a device value on the host, in a capture. Captured work has not run: there is "
        f"no value to read. Keep the value in a tensor, or read it before the capture or after the replay"
    )


def refusal(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[torch.Tensor]
) -> CaptureError | None:
    """Return the error of a call that can't be captured, or None. `given` are the call's tensors."""
    if _in_compiled_function():
        return CaptureError(
            f"{func} at {user_line()} comes from a function under torch.compile, whose kernels can't be "
            f"recorded: capture the function itself"
        )
    if func.overloadpacket in RESIZING:
        return CaptureError(f"{func} at {user_line()} changes a tensor's memory: allocate at the final size")
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Generator) and value is not torch.default_generator:
            return CaptureError(
                f"{func} at {user_line()} draws from a generator that is not registered with the graph: its "
                f"state would be baked. Use the default generator, or draw before the capture"
            )
    if any(t.layout != torch.strided or t.is_quantized or t.is_conj() or t.is_neg() for t in given):
        return CaptureError(f"{func} at {user_line()}: only plain strided tensors can be captured")
    if torch.Tag.data_dependent_output in func.tags or func.overloadpacket in _COUNTED:
        return host_read_error(str(func))
    writes_several = func.overloadpacket in _INDEX_PUT and args[2].numel() != 1
    if not writes_several and func is not _aten.index.Tensor:
        return None
    masked = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return host_read_error(f"{func} with a boolean mask") if masked else None


class HostReadMode(TorchFunctionMode):
    """Raises HostReadError for host reads that do not reach the dispatcher.

    `.to()` is refused only with the literal "cpu" or "cpu:0". Portable code calls `.to(platform.device)`, which is
    allowed.
    """

    def __init__(self, report: Callable[[HostReadError], None]) -> None:
        super().__init__()
        self._report = report

    def __torch_function__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        what = _READS.get(func)
        to = kwargs.get("device", args[1] if len(args) > 1 else None)
        if func is torch.Tensor.to and isinstance(to, str) and to.partition(":")[0] == "cpu":
            what = '.to("cpu")'
        if func in _SPLITS and any(isinstance(a, torch.Tensor) for a in (*args[1:], *kwargs.values())):
            what = "tensor_split with its sections in a tensor"
        if what is not None:
            error = host_read_error(what)
            self._report(error)
            raise error
        return func(*args, **kwargs)


def _in_compiled_function() -> bool:
    """Return whether a caller is a function under `torch.compile`. Below a dispatch mode dynamo runs such a function
    eagerly: without this check a capture would hold other kernels than the compiled function runs.
    """
    if "torch._dynamo" not in sys.modules:
        return False
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper" and frame.f_code.co_filename.startswith(TORCH):
            return True
        frame = frame.f_back
    return False
