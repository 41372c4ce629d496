"""Running a recorded op again at the least cost per call, with exactly the same result.

torch's Python bindings (`torch.add`, `Tensor.copy_`) cost about half of what an `OpOverload` call costs, and `out=`
saves the allocation and the copy into the captured block. A binding is used only if a trial call dispatches exactly the
recorded overload with exactly the recorded arguments; otherwise the overload itself is called. Measured:
without the bindings a replay takes about 10 % more host time per op, without `rewrites.py` as well about 40 %.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from specgraph.device.cpu.rewrites import rewrite

_Outputs = list[tuple[int, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Binding:
    """The call of one task: a function, and the keywords that take its output blocks."""

    function: Callable[..., Any]
    out_names: tuple[str, ...] = ()
    out_tuple: bool = False
    copies: bool = False
    """The function returns fresh tensors, to be copied into the blocks."""
    is_sequence: bool = False
    rewritten: OpOverload | None = None
    """`rewrites.rewrite` has another way to run this op."""

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: _Outputs) -> Callable[[], Any]:
        """Return the task as a callable without arguments."""
        blocks = tuple(block for _, block in outputs)
        if self.rewritten is not None:
            call = rewrite(self.rewritten, args, kwargs, blocks)
            assert call is not None
            return call
        if self.copies:
            return partial(_run_and_copy, self.function, args, kwargs, outputs, self.is_sequence)
        return partial(self.function, *args, **self._with_out(kwargs, blocks))

    def _with_out(self, kwargs: dict[str, Any], blocks: tuple[torch.Tensor, ...]) -> dict[str, Any]:
        if self.out_tuple:
            return {**kwargs, "out": blocks}
        return {**kwargs, **dict(zip(self.out_names, blocks, strict=True))}


def _run_and_copy(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], outputs: _Outputs, is_sequence: bool
) -> None:
    result = function(*args, **kwargs)
    for index, block in outputs:
        block.copy_(result[index] if is_sequence else result)


def bind(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: _Outputs, is_sequence: bool, count: int
) -> Binding:
    """Choose how to run `func` on baked arguments so that its results land in `outputs`.

    Args:
        is_sequence: the op returns several values.
        count: how many values it returns. Where `outputs` has fewer, nothing reads the others.
    """
    if rewrite(func, args, kwargs, tuple(block for _, block in outputs)) is not None:
        return Binding(func._op, rewritten=func)
    if not outputs:
        return Binding(_fastest(func, func, args, kwargs, {}) or func._op)
    if len(outputs) == count and not func._schema.is_mutable and (found := out_variant(func)) is not None:
        overload, names = found
        blocks = tuple(block for _, block in outputs)
        out = {"out": blocks if count > 1 else blocks[0]}
        fast = _fastest(func, overload, args, kwargs, out, dict(zip(names, blocks, strict=True)))
        if fast is not None:
            return Binding(fast, ("out",), out_tuple=count > 1)
        return Binding(overload._op, names)
    return Binding(_fastest(func, func, args, kwargs, {}) or func._op, copies=True, is_sequence=is_sequence)


@cache
def out_variant(func: OpOverload) -> tuple[OpOverload, tuple[str, ...]] | None:
    """Return the overload with the same arguments that writes all results into given tensors, and its out names."""
    wanted = [(a.name, str(a.type)) for a in func._schema.arguments]
    if func.namespace != "aten" or any(str(r.type) != "Tensor" for r in func._schema.returns):
        return None
    for name in func.overloadpacket.overloads():
        overload = getattr(func.overloadpacket, name)
        outs = [a for a in overload._schema.arguments if a.is_out]
        rest = [(a.name, str(a.type)) for a in overload._schema.arguments if not a.is_out]
        if len(outs) == len(func._schema.returns) and rest == wanted:
            return overload, tuple(a.name for a in outs)
    return None


class _Reached(BaseException):
    """Raised by the trial mode with the op and arguments that a binding dispatched."""


class _Probe(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise _Reached(func, args, kwargs or {})


def _fastest(
    func: OpOverload,
    target: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out: dict[str, Any],
    schema_out: dict[str, Any] | None = None,
) -> Callable[..., Any] | None:
    """Return a Python binding that dispatches exactly `target` with exactly these arguments, or None."""
    if func.namespace != "aten":
        return None
    wanted = _by_name(target, args, {**kwargs, **(schema_out or {})})
    for candidate in _candidates(func._schema.name.removeprefix("aten::")):
        try:
            with torch.inference_mode(), torch._C.DisableTorchFunction(), _Probe():
                candidate(*args, **kwargs, **out)
        except _Reached as reached:
            overload, got_args, got_kwargs = reached.args
            if overload is target and _equal(wanted, _by_name(target, got_args, got_kwargs)):
                return candidate
        except Exception:  # the binding's signature differs: not a candidate
            continue
    return None


@cache
def _candidates(name: str) -> tuple[Callable[..., Any], ...]:
    homes: list[Any] = [getattr(torch._C, h) for h in ("_VariableFunctions", "_nn", "_special", "_linalg", "_fft")]
    names = [name, name.replace("special_", ""), name.replace("linalg_", "")]
    if name.endswith("_") and not name.endswith("__"):
        homes.insert(0, torch._C.TensorBase)
    found = [getattr(home, n) for home in homes for n in dict.fromkeys(names) if hasattr(home, n)]
    if not found and hasattr(torch._C.TensorBase, name):
        found.append(getattr(torch._C.TensorBase, name))
    return tuple(found)


def _by_name(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by schema name, those equal to their default left out."""
    arguments = func._schema.arguments
    named = dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
    return {
        a.name: named[a.name]
        for a in arguments
        if a.name in named and not (a.has_default_value() and _equal(named[a.name], a.default_value))
    }


def _equal(a: Any, b: Any) -> bool:
    """Tensors by identity; everything else by type and value."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return a is b
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    return type(a) is type(b) and a == b
