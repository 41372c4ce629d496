"""Ops that no capture can hold, told from the call alone."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from specgraph.cpu.checks.host_read import host_read_error
from specgraph.cpu.ops import RESIZING
from specgraph.device.source import in_compiled_function, user_line
from specgraph.errors import CaptureError

_aten = torch.ops.aten
_INDEX_PUT = (_aten.index_put_, _aten.index_put)
_COUNTED = (_aten.nonzero, _aten.masked_select)
"""Ops whose values decide how many results there are. Their fakes say so too, seconds later: they import a compiler."""


def refusal(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[torch.Tensor]
) -> CaptureError | None:
    """Return why the call can't be captured, or None; `given` are its tensors."""
    if in_compiled_function():
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
