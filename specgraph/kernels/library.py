"""How the draft ops become registered torch ops.

Every kernel is one `torch.library` op with a fake implementation, so capture checks, graph recorders and shape
inference all see it as one op. The reference is plain torch that any device can run and capture: static shapes, no
host reads. A device adds faster implementations under its own dispatch key with `implement`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

NAMESPACE = "specgraph"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")
_implemented: dict[str, dict[str, Callable[..., Any]]] = {}
"""By dispatch key: what `implement` was given for each op."""
_devices: dict[str, torch.library.Library] = {}
"""By dispatch key: what holds those registrations in torch's dispatcher."""


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
    known = _implemented.setdefault(dispatch_key, {})
    if name not in known:
        known[name] = function
        _register(dispatch_key, {name: function})


@contextmanager
def plain_torch(dispatch_key: str) -> Generator[None]:
    """Within it the ops run their plain torch references under that key: what implementations are compared with.

    For benchmarks and tests. It changes what the whole process runs, so nothing else may use the device meanwhile;
    graphs captured before keep what they were captured with.
    """
    if (held := _devices.pop(dispatch_key, None)) is not None:
        held._destroy()  # pyright: ignore[reportPrivateUsage]  (torch has no public way to take a registration back)
    try:
        yield
    finally:
        _register(dispatch_key, _implemented.get(dispatch_key, {}))


def _register(dispatch_key: str, functions: dict[str, Callable[..., Any]]) -> None:
    if functions and dispatch_key not in _devices:
        _devices[dispatch_key] = torch.library.Library(NAMESPACE, "IMPL", dispatch_key)
    for name, function in functions.items():
        _devices[dispatch_key].impl(name, function)


def dispatch_key_of(device: torch.device) -> str:
    """The key under which `implement` serves tensors of that device."""
    return torch._C._dispatch_key_for_device(device.type)  # pyright: ignore


def has_implementations(dispatch_key: str) -> bool:
    """Whether a device has implementations of its own under that key."""
    return bool(_implemented.get(dispatch_key))


def like_query(query: Tensor, *args: Any) -> Tensor:
    """Fake of the attention ops: one new tensor in the query's shape."""
    return query.new_empty(query.shape)


def _writes_only(*args: Any, **kwargs: Any) -> None:
    return None
