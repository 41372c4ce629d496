"""Properties of an op: whether it is a view, an allocation or a composition of others, and the tensors it writes."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

from specgraph.dispatch_mode import tensors_in

_aten = torch.ops.aten

_UNANNOTATED = {_aten._unsafe_view.default, _aten._reshape_alias.default, _aten.lift.default}
"""Views that their schema does not mark as views."""

EMPTY = frozenset(
    getattr(_aten, name)
    for name in ("empty", "empty_strided", "empty_like", "empty_permuted", "new_empty", "new_empty_strided")
)
"""Ops that only allocate. They are not recorded, since a replay must not touch the block."""

RESIZING = frozenset(
    getattr(_aten, name) for name in ("resize_", "resize_as_", "set_", "set_data", "_resize_output_")
    if hasattr(_aten, name)
)  # fmt: skip
"""Ops that change the memory of an existing tensor."""


@cache
def changes_metadata_only(func: OpOverload) -> bool:
    """Return whether `func` is a view, or changes sizes and strides in place."""
    if func.overloadpacket in RESIZING:
        return False
    return func.is_view or func in _UNANNOTATED or torch.Tag.inplace_view in func.tags


@cache
def is_composite(func: OpOverload) -> bool:
    """Return whether the CPU runs `func` as a composition of other ops.

    Such an op reaches a dispatch mode whole under `inference_mode`, and in parts otherwise. The recorder always records
    the parts: both captures are then the same, and each part can write straight into its block.
    """
    name = func.name()
    return torch._C._dispatch_has_kernel_for_dispatch_key(
        name, "CompositeImplicitAutograd"
    ) and not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU")


def written_by(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    """Return the `id()` of each tensor that the op writes, by its schema."""
    written = [args[place] if place < len(args) else kwargs.get(name) for place, name in _written(func)]
    return {id(t) for t in tensors_in(written)}


@cache
def _written(func: OpOverload) -> list[tuple[int, str]]:
    """Return the place and the name of each argument that the op writes."""
    arguments = enumerate(func._schema.arguments)
    return [(place, a.name) for place, a in arguments if a.alias_info is not None and a.alias_info.is_write]
