"""Host reads that torch does not dispatch for a CPU tensor, so that only a torch function mode can see them.

`.item()`, `bool(t)`, `nonzero` and boolean masks are dispatched; the recorder refuses those.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from specgraph.device.source import user_line
from specgraph.errors import HostReadError

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
    """Return the error of a read; `what` is the op or the call."""
    if "_local_scalar_dense" in what:
        what = f"a branch, .item(), int() or index of Python's on a tensor ({what})"
    return HostReadError(
        f"{what} at {user_line()} reads a device value on the host, in a capture. Captured work has not run: there is "
        f"no value to read. Keep the value in a tensor, or read it before the capture or after the replay"
    )


class HostReadMode(TorchFunctionMode):
    """Raises HostReadError for host reads that do not reach the dispatcher.

    `.to("cpu")` is refused only as that literal; `.to(platform.device)`, which portable code calls, is allowed.
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
