"""A base of dispatch modes that does not import torch's compiler, and the tensors in a mode's arguments."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that torch's compiler does not compile.

    torch wraps `__torch_dispatch__` of every mode to ensure that, and the wrapper imports the compiler, which takes 3 s
    of a start-up. Here `__enter__` wraps it, only if the compiler is imported already.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # no wrapper: see __enter__

    def __enter__(self) -> Any:
        mode: Any = type(self)
        if "torch._dynamo" in sys.modules and not hasattr(mode.__torch_dispatch__, "_torchdynamo_disable"):
            mode.__torch_dispatch__ = torch.compiler.disable(mode.__torch_dispatch__)
        return super().__enter__()


def tensors_in(*values: Any) -> list[torch.Tensor]:
    """Return all tensors in nested lists and tuples, in order."""
    found: list[torch.Tensor] = []
    for value in values:  # runs several times per captured op, so it must be fast
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(*value)
    return found
