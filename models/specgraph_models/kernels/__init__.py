"""Triton kernels of the ops of models, and the calls that try them on a device.

The modules here need `triton`; models do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from specgraph.ops.linear import Norm, Weight


def gated_linear() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the arguments of one gated linear of six rows."""
    g = torch.Generator().manual_seed(0)
    x, norm, weight = (torch.randn(shape, generator=g).to(torch.bfloat16) for shape in ((6, 64), (64,), (192, 64)))
    yield "norm_gate_up", {"x": x, "norm": Norm(norm, 1e-6), "weight": Weight(weight / 8)}
