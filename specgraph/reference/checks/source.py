"""Where in the user's program an op was issued."""

from __future__ import annotations

import os
import sys

import torch

_TORCH = os.path.dirname(os.path.abspath(str(torch.__file__))) + os.sep
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_OURS = tuple(os.path.join(_PACKAGE, room) + os.sep for room in ("reference", "platforms"))
_DISPATCH = frozenset({"__torch_dispatch__", "__torch_function__"})


def user_line() -> str:
    """`file:line` of the innermost frame outside of torch, the platforms and dispatch handlers."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        name = frame.f_code.co_filename
        if (
            not name.startswith((_TORCH, *_OURS, "<"))
            and frame.f_code.co_name not in _DISPATCH
            and os.path.basename(name) != "contextlib.py"
        ):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown line"


def in_compiled_function() -> bool:
    """Whether a caller is under `torch.compile`. Below a dispatch mode dynamo runs such code eagerly, so without
    this check a capture would hold other kernels than the program runs outside of it.
    """
    if "torch._dynamo" not in sys.modules:
        return False
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper" and frame.f_code.co_filename.startswith(_TORCH):
            return True
        frame = frame.f_back
    return False
