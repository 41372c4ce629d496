"""How the draft ops become registered torch ops.

Every kernel is one `torch.library` op with a fake implementation, so capture checks, graph recorders and shape
inference all see it as one op. The reference is plain torch that any device can run and capture: static shapes, no
host reads. A device adds faster implementations under its own dispatch key with `implement`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NAMESPACE = "specgraph"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")
_implemented: set[tuple[str, str]] = set()


def define(
    schema: str,
    *,
    reference: Callable[..., Any],
    fake: Callable[..., Any] | None = None,
    host: Callable[..., Any] | None = None,
) -> Any:
    """Register one op and return its default overload.

    Args:
        schema: torch schema without the namespace, `name(args) -> returns`.
        reference: capturable plain torch, for every device without an implementation of its own.
        fake: shapes and dtypes of the outputs; None for ops that only write their arguments.
        host: a faster implementation for tensors in host memory, which may read values.
    """
    name = schema.partition("(")[0].strip()
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
    if host is not None:
        _LIBRARY.impl(name, host, "CPU")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake or _writes_only, lib=_LIBRARY)
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.specgraph, packet), overload or "default")


def implement(name: str, dispatch_key: str, function: Callable[..., Any]) -> None:
    """Add a device's implementation of op `name` under a torch dispatch key ("CUDA", "PrivateUse1", ...).

    Doing it twice for one op and key keeps the first, so that opening a platform twice is harmless.
    """
    if (name, dispatch_key) not in _implemented:
        _LIBRARY.impl(name, function, dispatch_key)
        _implemented.add((name, dispatch_key))


def like_query(query: Tensor, *args: Any) -> Tensor:
    """Fake of the attention ops: one new tensor in the query's shape."""
    return query.new_empty(query.shape)


def _writes_only(*args: Any, **kwargs: Any) -> None:
    return None
