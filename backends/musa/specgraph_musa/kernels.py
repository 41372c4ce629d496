"""The shared Triton kernels on this device: tried first, and given arguments with canonical strides."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from specgraph.platforms import Support, no, yes
from torch import Tensor

if TYPE_CHECKING:
    from specgraph_musa.platform import MusaPlatform


def probe_triton(platform: MusaPlatform) -> Support:
    """Whether Triton's kernels run on the platform's tensors and agree with the reference; if so, they are registered.

    The driver's package has had several names (mtgpu, musa, mthreads), so the target that Triton compiles for decides.
    """
    if importlib.util.find_spec("triton") is None:
        return no("triton is not installed: install Moore Threads' build of it. The plain torch ops run, slower")
    try:
        from triton.runtime import driver  # pyright: ignore[reportMissingImports]

        target = driver.active.get_current_target().backend
    except Exception as error:
        text = str(error).strip()
        return no(f"triton is installed and finds no device: {text.splitlines()[0] if text else type(error).__name__}")
    if target != platform.device.type:
        return no(f"this triton compiles for '{target}', the tensors are on '{platform.device.type}'")
    from specgraph_musa.triton_ops import agree_with_reference, register_ops

    try:
        wrong = agree_with_reference(platform)
    except Exception as error:
        text = str(error).strip()
        wrong = f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"
    if wrong is not None:
        return no(f"its probe failed on this device: {wrong}. The plain torch ops run, slower")
    register_ops(platform)
    return yes()


def canonical(tensor: Tensor) -> Tensor:
    """`tensor` if its rows are packed (each row one after another, the first dimension may have any stride), else a
    packed copy."""
    expected = 1
    for size, stride in zip(reversed(tensor.shape[1:]), reversed(tensor.stride()[1:]), strict=True):
        if size > 1 and stride != expected:
            return tensor.contiguous()
        expected *= size
    if tensor.dim() == 1 and tensor.shape[0] > 1 and tensor.stride(0) != 1:
        return tensor.contiguous()
    return tensor


def canonical_arguments(
    schema: torch.FunctionSchema, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of one op call with packed rows, for kernels that assume them.

    Raises:
        ValueError: an argument that the op writes is not packed, so that a copy would lose what is written.
    """
    named = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | dict(kwargs)
    written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    for name, value in named.items():
        packed = canonical(value) if isinstance(value, Tensor) else value
        if packed is not value and name in written:
            raise ValueError(
                f"{schema.name} writes '{name}', whose strides are {tuple(value.stride())} for shape "
                f"{list(value.shape)}: its rows must be packed"
            )
        named[name] = packed
    return tuple(named.values())[: len(args)], {name: named[name] for name in kwargs}
