"""Declaring the draft ops: one typed Python function per op is its schema, its reference and its documentation.

Every kernel is one `torch.library` op with a fake implementation, so that capture checks, graph recorders and shape
inference all see it as one op. The reference is plain torch that any device can run and capture: static shapes, no
host reads. A device adds faster implementations under its own dispatch key with `implement`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

NAMESPACE = "specgraph"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")
_declared: dict[str, Op[Any, Any]] = {}
_implemented: dict[str, dict[str, Callable[..., Any]]] = {}
"""By dispatch key: what `implement` was given for each op."""
_devices: dict[str, torch.library.Library] = {}
"""By dispatch key: what holds those registrations in torch's dispatcher."""


class Op(Generic[P, R]):
    """One registered op. Calling it runs the implementation for the device of its tensors.

    Attributes:
        name: in `torch.ops.specgraph`.
        reference: the plain torch function that declares it. It runs on every device and in every dtype.
        overload: what torch dispatches; graph recorders see this.
    """

    def __init__(self, name: str, reference: Callable[P, R], overload: Callable[P, R]) -> None:
        self.name = name
        self.reference = reference
        self.overload = overload
        self.__doc__ = reference.__doc__
        self.__wrapped__ = reference  # the signature that help() and inspect show

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Dispatch by the device of the tensors."""
        return self.overload(*args, **kwargs)

    def on(self, device: torch.device) -> Callable[P, R]:
        """What a call runs for tensors of that device: a device's own implementation without torch's dispatcher, which
        takes 5 to 10 us to reach a Python function. For calls outside captures only: no recorder or guard sees them.
        """
        key = dispatch_key_of(device)
        return _implemented[key].get(self.name, self.overload) if key in _devices else self.overload

    def __repr__(self) -> str:
        return f"<op {NAMESPACE}::{self.name}>"


def op(
    *, writes: Iterable[str] = (), fake: Callable[..., Any] | None = None, host: Callable[..., Any] | None = None
) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Register the decorated function as an op of its name. Its typed signature is the op's schema.

    Args:
        writes: names of the tensor arguments that it writes.
        fake: shapes and dtypes of the results, from the same arguments; None for an op that returns nothing.
        host: a faster implementation for tensors in host memory. It may read values, which a reference may not.
    """

    def register(reference: Callable[P, R]) -> Op[P, R]:
        name = reference.__name__
        _LIBRARY.define(torch.library.infer_schema(reference, mutates_args=tuple(writes), op_name=name))
        _LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
        if host is not None:
            _same_parameters(name, reference, host)
            _LIBRARY.impl(name, host, "CPU")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake or _returns_nothing, lib=_LIBRARY)
        _declared[name] = Op(name, reference, getattr(torch.ops.specgraph, name).default)
        return _declared[name]

    return register


def implement(name: str, dispatch_key: str, function: Callable[..., Any]) -> None:
    """Add a device's implementation of op `name` under a torch dispatch key ("CUDA", "PrivateUse1", ...).

    Doing it twice for one op and key keeps the first, so that opening a platform twice is harmless.

    Args:
        function: takes the parameters of the reference: same names, order and defaults. torch passes keyword-only
            parameters by name, and leaves out those that equal their default.

    Raises:
        TypeError: the parameters differ.
    """
    _same_parameters(name, _declared[name].reference, function)
    known = _implemented.setdefault(dispatch_key, {})
    if name not in known:
        known[name] = function
        _register(dispatch_key, {name: function})


def _same_parameters(name: str, reference: Callable[..., Any], function: Callable[..., Any]) -> None:
    wanted, given = (
        [(p.name, p.kind, p.default) for p in inspect.signature(f).parameters.values()] for f in (reference, function)
    )
    if wanted != given:
        raise TypeError(
            f"an implementation of {NAMESPACE}::{name} takes {inspect.signature(function)}, the op is declared with "
            f"{inspect.signature(reference)}: use the same names, order and defaults"
        )


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


def like_query(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Fake of the attention ops: one new tensor in the query's shape."""
    return query.new_empty(query.shape)


def _returns_nothing(*args: Any, **kwargs: Any) -> None:
    return None
