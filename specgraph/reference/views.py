"""Ops that make or change a tensor's metadata and touch no element."""

from __future__ import annotations

from functools import cache

import torch
from torch._ops import OpOverload

_aten = torch.ops.aten

_UNANNOTATED = {_aten._unsafe_view.default, _aten._reshape_alias.default, _aten.lift.default}
"""Views whose schema doesn't say so."""

EMPTY = frozenset(
    getattr(_aten, name)
    for name in ("empty", "empty_strided", "empty_like", "empty_permuted", "new_empty", "new_empty_strided")
)
"""Allocation only: a replay must not touch the block."""

RESIZING = frozenset(
    getattr(_aten, name) for name in ("resize_", "resize_as_", "set_", "set_data", "_resize_output_")
    if hasattr(_aten, name)
)  # fmt: skip
"""They change which memory an existing tensor stands on."""


@cache
def changes_metadata_only(func: OpOverload) -> bool:
    """Whether `func` is a view, or changes sizes and strides in place."""
    if func.overloadpacket in RESIZING:
        return False
    return func.is_view or func in _UNANNOTATED or torch.Tag.inplace_view in func.tags
