"""Shapes, strides, dtypes and aliasing of an op's results, without running it."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Hashable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import TreeSpec, tree_flatten

from specgraph.cpu.baking import map_tensors
from specgraph.cpu.meta import on_meta
from specgraph.dispatch_mode import tensors_in


@dataclass(slots=True)
class Inferred:
    """The results that a call would return. `aliases[i]`: the input that output i shares storage with, or None."""

    outputs: list[Any]
    """Tensors without memory, and what else is returned."""
    devices: set[str]
    """The types of the devices that the results would be on."""
    spec: TreeSpec
    aliases: list[int | None]
    resized: int | None
    """The index of an input whose storage the call would resize."""


_KNOWN_LIMIT = 8192
_known: dict[Hashable, Inferred] = {}
"""Results by call. Captures repeat the same few calls, and a fake takes longer than all else of recording one."""


def infer(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inferred:
    """Run `func` on tensors without memory; raises what torch's fake tensor mode raises.

    Results are cached by op, arguments and default dtype: a fake implementation must depend on nothing else.
    """
    key = _key(func, args, kwargs)
    if key is None:
        return _infer(func, args, kwargs)
    if (found := _known.get(key)) is None:
        if len(_known) >= _KNOWN_LIMIT:
            _known.clear()
        found = _known[key] = _infer(func, args, kwargs)
    return found


def _infer(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inferred:
    """Ask the op's meta kernel, and torch's fake tensor mode where that has no answer for tensors on the CPU."""
    given = tensors_in(args, list(kwargs.values()))
    if all(t.device.type == "cpu" for t in given) and str(kwargs.get("device", "cpu")) == "cpu":
        try:
            found = _run(func, args, kwargs, None)
        except Exception:  # the mode raises what says why
            found = None
        if found is not None and found.devices <= {"meta"}:
            found.devices = {"cpu"} if found.devices else set()
            return found
    return _run(func, args, kwargs, FakeTensorMode())


def _run(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], mode: FakeTensorMode | None) -> Inferred:
    storages: dict[int, torch.UntypedStorage] = {}
    fakes: list[torch.Tensor] = []

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        real = tensor.untyped_storage()
        storage = storages.get(real._cdata)
        if storage is None:
            storage = storages[real._cdata] = torch.UntypedStorage(real.nbytes(), device="meta")
        meta = torch.empty(0, dtype=tensor.dtype, device="meta")
        meta.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
        fakes.append(meta if mode is None else FakeTensor(mode, meta, tensor.device))
        return fakes[-1]

    with torch.inference_mode(False), torch.no_grad(), nullcontext() if mode else no_dispatch():
        fake_args, fake_kwargs = map_tensors((args, kwargs), fake)
        before = [f.untyped_storage().nbytes() for f in fakes]
        with mode or nullcontext():
            result = func(*fake_args, **fake_kwargs) if mode else on_meta(func, *fake_args, **fake_kwargs)
        outputs, spec = tree_flatten(result)
        owner = {f.untyped_storage()._cdata: i for i, f in reversed(list(enumerate(fakes)))}
        aliases: list[int | None] = []
        for out in outputs:
            index = next((i for i, f in enumerate(fakes) if f is out), None)
            if index is None and isinstance(out, torch.Tensor):
                index = owner.get(out.untyped_storage()._cdata)
            aliases.append(index)
        resized = next((i for i, f in enumerate(fakes) if f.untyped_storage().nbytes() != before[i]), None)
    return Inferred(outputs, {t.device.type for t in tensors_in(outputs)}, spec, aliases, resized)


_PLAIN = (int, float, bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


def _key(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable | None:
    """Return the cache key of a call: all that its fake may depend on; None if an argument has no key."""
    parts: list[Hashable] = [func, torch.get_default_dtype()]
    storages: dict[int, int] = {}

    def add(value: Any) -> bool:
        if value is None:
            parts.append(None)
        elif isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            shared = storages.setdefault(storage._cdata, len(storages))
            place = value.storage_offset(), tuple(value.size()), value.stride()
            parts.append((value.dtype, value.device, place, shared, storage.nbytes()))
        elif isinstance(value, (list, tuple)):
            parts.append((type(value), len(value)))
            return all(map(add, value))
        elif isinstance(value, _PLAIN):
            parts.append((type(value), value))  # 1, 1.0 and True are equal, and give different dtypes
        else:
            return False
        return True

    if not all(map(add, args)):
        return None
    for name, value in kwargs.items():
        parts.append(name)
        if not add(value):
            return None
    return tuple(parts)
