"""Random tensors on the GPU, and how far an op may be from its reference in float64.

The fixture skips where the Triton ops are not used; a module that imports it uses it.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specgraph.device import Platform

TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 3e-6}


@pytest.fixture(autouse=True)
def triton_ops(platform: Platform) -> None:
    triton = platform.capabilities.notes["triton"]
    if not triton:
        pytest.skip(triton.reason)
    torch.manual_seed(0)


def close(got: Tensor, want: Tensor) -> None:
    error = float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-12))
    assert error < TOLERANCE[got.dtype], error  # NaN fails too


def make(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)
