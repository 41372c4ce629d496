"""Declares draft ops: one typed Python function per op is its schema, its reference and its documentation.

A parameter may be a named tuple of tensors and numbers, see `records`.

Each op is one `torch.library` op with a fake implementation, so that capture checks, graph recorders and shape
inference all see it as one op. The reference is plain torch with static shapes and without host reads, so that any
device can run and capture it. A device adds faster implementations under its own dispatch key with `implement`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from specgraph.errors import ConfigError, first_line
from specgraph.ops.records import Parameters

P = ParamSpec("P")
R = TypeVar("R")

NAMESPACE = "specgraph"
ENTRY_POINT_GROUP = "specgraph.ops"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")
_declared: dict[str, Op[Any, Any]] = {}
_implemented: dict[str, dict[str, Callable[..., Any]]] = {}
"""The implementations: op name -> function with the parameters of the reference, by dispatch key."""
_devices: dict[str, torch.library.Library] = {}
"""The registrations in torch's dispatcher, by dispatch key."""
_kernels: list[str] = []
"""The places that packages gave to `name_kernels`."""
_uses: list[Callable[[str], None]] = []
"""The functions given to `use_kernels`."""


class Op(Generic[P, R]):
    """One registered op. Calling it runs the implementation for the device of its tensors. Graph recorders see
    `overload`, the torch op. `reference`, plain torch, runs on every device and in every dtype."""

    def __init__(
        self, name: str, reference: Callable[P, R], parameters: Parameters, overload: Callable[..., R]
    ) -> None:
        self.name = name
        self.reference = reference
        self.parameters = parameters
        self.overload = overload
        self.__doc__ = reference.__doc__
        self.__wrapped__ = reference  # the signature that help() and inspect show

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Dispatch by the device of the tensors."""
        try:
            if not self.parameters.has_records:
                return self.overload(*args, **kwargs)
            flat, named = self.parameters.flatten(args, kwargs)
            return self.overload(*flat, **named)
        except RuntimeError as error:
            if str(error).startswith(f"{NAMESPACE}::{self.name}() "):  # the arguments don't fit the op's schema
                raise ConfigError(f"the op {first_line(error)}") from error
            raise

    def on(self, device: torch.device) -> Callable[P, R]:
        """Return the device's implementation, to be called directly, or this op if the device has none.

        A direct call saves the 5 to 10 us that torch's dispatcher takes to reach a Python function. It is for calls
        outside captures only: no recorder or guard sees them.
        """
        key = dispatch_key_of(device)
        return _implemented[key].get(self.name, self) if key in _devices else self

    def __repr__(self) -> str:
        return f"<op {NAMESPACE}::{self.name}>"


def op(
    *, writes: Iterable[str] = (), fake: Callable[..., Any] | None = None, host: Callable[..., Any] | None = None
) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Register the decorated function as an op of the same name. Its typed signature is the op's schema.

    Args:
        writes: the tensors that it writes: parameters ("out"), whole records ("rows"), or fields ("rows.positions").
        fake: takes the same parameters, and returns empty results of the right shapes and dtypes. By default the
            reference itself, or a function that does nothing if the op returns nothing.
        host: a faster implementation for tensors in host memory. It may read values, which a reference may not.
    """

    def register(reference: Callable[P, R]) -> Op[P, R]:
        name, parameters = reference.__name__, Parameters(reference, writes)
        flat = parameters.with_records(reference)
        schema = torch.library.infer_schema(flat, mutates_args=parameters.written, op_name=name)
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, flat, "CompositeExplicitAutograd")
        if host is not None:
            _same_parameters(name, reference, host)
            _LIBRARY.impl(name, parameters.with_records(host), "CPU")
        overload = getattr(torch.ops.specgraph, name).default
        shapes = fake or (reference if overload._schema.returns else _returns_nothing)
        torch.library.register_fake(f"{NAMESPACE}::{name}", parameters.with_records(shapes), lib=_LIBRARY)
        _declared[name] = Op(name, reference, parameters, overload)
        return _declared[name]

    return register


Around = Callable[[Op[Any, Any], Callable[..., Any]], Callable[..., Any]]
"""(op, its implementation) -> the implementation, wrapped for the device."""


def implement(name: str, dispatch_key: str, function: Callable[..., Any], around: Around | None = None) -> None:
    """Add a device's implementation of op `name` under a torch dispatch key, such as "PrivateUse1".

    A second implementation for the same op and key is ignored, so that opening a platform twice is harmless.

    Args:
        function: takes the parameters of the reference: same names, order and defaults. torch passes keyword-only
            parameters by name, and leaves out a parameter that equals its default. The function may write nothing and
            return NotImplemented: the reference then runs.
        around: wraps the function.

    Raises:
        TypeError: if the parameters differ.
    """
    declared = _declared[name]
    _same_parameters(name, declared.reference, function)

    def implemented(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        return declared.reference(*args, **kwargs) if result is NotImplemented else result

    known = _implemented.setdefault(dispatch_key, {})
    if name not in known:
        known[name] = implemented if around is None else around(declared, implemented)
        _register(dispatch_key, {name: known[name]})


def implement_all(kernels: object, dispatch_key: str, around: Around | None = None) -> None:
    """Call `implement` for each method of `kernels` that has the name of an op."""
    methods = {name: getattr(kernels, name) for name in dir(kernels) if name in _declared}
    for name, function in methods.items():
        implement(name, dispatch_key, function, around)


def declared() -> Mapping[str, Op[Any, Any]]:
    """Return the ops of all imported packages, by name."""
    return _declared


def name_kernels(place: str) -> None:
    """Register the place of the Triton kernels for a package's ops. Only devices that Triton compiles for import it.

    Args:
        place: `module:NAME` of a `specgraph.kernels.implement.Kernels`.
    """
    if place not in _kernels:
        _kernels.append(place)
        for use in _uses:
            use(place)


def use_kernels(use: Callable[[str], None]) -> None:
    """Call `use` with each place that was given to `name_kernels`, and with each later one when it is given."""
    _uses.append(use)
    for place in _kernels:
        use(place)


def import_installed() -> None:
    """Import the modules that installed distributions list as entry points of the group `specgraph.ops`."""
    for entry in metadata.entry_points(group=ENTRY_POINT_GROUP):
        entry.load()


def kernel_places() -> Sequence[str]:
    """Return the places that were given to `name_kernels` so far."""
    return _kernels


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
    """Within the block, ops run their plain torch references under that dispatch key instead of implementations.

    Benchmarks and tests compare implementations with it. It changes the whole process, so nothing else may use the
    device meanwhile. Graphs that were captured before keep the implementations that they were captured with.
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
        _devices[dispatch_key].impl(name, _declared[name].parameters.with_records(function))


def dispatch_key_of(device: torch.device) -> str:
    """Return the dispatch key of the device's tensors, as `implement` takes it."""
    return torch._C._dispatch_key_for_device(device.type)  # pyright: ignore


def has_implementations(dispatch_key: str) -> bool:
    """Return whether any op has an implementation under that dispatch key."""
    return bool(_implemented.get(dispatch_key))


def like_first(first: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return a new tensor like the first argument: the fake implementation of ops with such a result."""
    return first.new_empty(first.shape)


def _returns_nothing(*args: Any, **kwargs: Any) -> None:
    return None
