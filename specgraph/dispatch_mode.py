"""Dispatch modes whose first use does not import torch's compiler, and the tensors that they are given."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that torch's compiler leaves alone, wherever it is in use.

    torch wraps `__torch_dispatch__` of every mode for that, and the wrapper imports the compiler: 3 s of a start-up.
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
    for value in values:  # several times in each op of a capture: as little as possible
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(*value)
    return found
