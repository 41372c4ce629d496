"""The read set: the tensors that a captured graph may touch, declared by name and checked.

The most common silent bug of captured graphs is a tensor that is read but no longer updated: metadata was reassigned
instead of written in place, a temporary was freed, or a host scalar was baked in.

Here every persistent tensor has a name. An op that touches a storage without a name, which was not allocated inside the
graph, is an error of the capture. Before a replay, `Fingerprint.check` compares the addresses of the named tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specgraph.dispatch_mode import DispatchMode, tensors_in
from specgraph.errors import ReadSetError, StaleInputError
from specgraph.user_code import user_line, variable_name

ReadSet = Callable[[], Mapping[str, Tensor]]
"""Returns the current persistent tensors by name. It is called again before each checked replay."""


def _base(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, which is the same for all views of one allocation."""
    return tensor.untyped_storage().data_ptr()


class ReadSetGuard(DispatchMode):
    """A dispatch mode that checks the tensors of each op during a capture. A piecewise capture enters it several times.

    Storages that are allocated during the capture are recognised by address. They come from the graph's private pool,
    which holds no named tensor, and belong to the graph as long as it lives.
    """

    def __init__(self, named: Mapping[str, Tensor], device: torch.device) -> None:
        super().__init__()
        self._names = {_base(tensor): name for name, tensor in named.items()}
        self._device = device
        self._produced: set[int] = set()
        self._literals: list[Tensor] = []  # kept alive, so that no other tensor gets their addresses
        self.touched: set[str] = set()
        """Names of the tensors that the capture read or wrote."""

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.lift_fresh.default and args[0].dim() == 0:
            self._literals.append(args[0])  # a number in the model's code, as in `x[:, -1] = 2.5`: a kernel argument
            self._produced.add(_base(args[0]))
        for tensor in tensors_in(args, list(kwargs.values())):
            self._check(func, tensor)
        result = func(*args, **kwargs)
        self._produced.update(base for base in map(_base, tensors_in(result)) if base not in self._names)
        return result

    def _check(self, func: Any, tensor: Tensor) -> None:
        base = _base(tensor)
        if base in self._produced or tensor.numel() == 0:
            return
        if base in self._names:
            self.touched.add(self._names[base])
            return
        name = variable_name(tensor)
        which = f"the tensor '{name}'" if name else "a tensor"
        what = f"{user_line()}: {func} touches {which} {list(tensor.shape)} {tensor.dtype} on {tensor.device}"
        if tensor.device != self._device:
            raise ReadSetError(
                f"{what} while capturing for {self._device}: its value would be baked into the graph. Make it a "
                "device tensor before capture, and return it from the model's weights() or a backend's named_tensors()."
            )
        raise ReadSetError(
            f"{what}, which is neither a weight, a KV cache, a named buffer, nor made in the graph. Replays would read "
            "this very memory whatever becomes of the tensor. If it is constant, return it from the model's weights() "
            "(or the attention backend's named_tensors()); else write its contents into a named buffer, in place."
        )


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The addresses, shapes and strides at capture of the tensors that a graph touches."""

    places: Mapping[str, tuple[int, torch.Size, tuple[int, ...]]]

    def check(self, named: Mapping[str, Tensor], graph: str) -> None:
        """Raise StaleInputError if a tensor is gone, or was reassigned, moved or reshaped since capture."""
        for name, place in self.places.items():
            tensor = named.get(name)
            if tensor is None:
                raise StaleInputError(f"graph {graph}: '{name}', which it reads, is no longer in the read-set")
            if _place(tensor) != place:
                raise StaleInputError(
                    f"graph {graph}: '{name}' was reassigned or moved since capture (now {list(tensor.shape)} at "
                    f"{tensor.data_ptr():#x}, captured {list(place[1])} at {place[0]:#x}); the graph would read the "
                    "old memory. Write new values in place (copy_), or capture again."
                )


def _place(tensor: Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def fingerprint(named: Mapping[str, Tensor], touched: Iterable[str]) -> Fingerprint:
    """Return the fingerprint of the named tensors that share a storage with one of the `touched` names."""
    bases = {_base(named[name]) for name in touched}
    return Fingerprint({name: _place(tensor) for name, tensor in named.items() if _base(tensor) in bases})
