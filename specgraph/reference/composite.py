"""Ops that are only a composition of other ops."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

from functools import cache

import torch
from torch._ops import OpOverload


@cache
def is_composite(func: OpOverload) -> bool:
    """Whether the CPU runs `func` as its composition.

    Under `inference_mode` such ops reach a dispatch mode whole, otherwise in parts; recording the parts makes both the
    same, and lets each part write straight into its block.
    """
    name = func.name()
    return torch._C._dispatch_has_kernel_for_dispatch_key(
        name, "CompositeImplicitAutograd"
    ) and not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU")
