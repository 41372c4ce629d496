"""A mode in which "cuda" is the CPU, for tests that name the device themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def _moved(value: Any) -> Any:
    return "cpu" if isinstance(value, (str, torch.device)) and str(value).startswith("cuda") else value


class CudaOnCpu(TorchFunctionMode):
    """Sends to the CPU what a test sends to "cuda"."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        return func(*map(_moved, args), **{name: _moved(value) for name, value in (kwargs or {}).items()})
