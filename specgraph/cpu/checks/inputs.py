"""The memory that a graph uses but did not allocate. It must stay at its address of the capture."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from specgraph.errors import CaptureError, StaleInputError


@dataclass(slots=True)
class _Tensor:
    ref: weakref.ref[torch.Tensor]
    address: int
    numel: int
    shape: tuple[int, ...]


@dataclass(slots=True)
class _Storage:
    ref: weakref.ref[Any]
    address: int
    nbytes: int
    what: str
    tensors: dict[int, _Tensor] = field(default_factory=dict[int, _Tensor])


class Inputs:
    """The external tensors of one graph, by weak references: their owner keeps them alive."""

    def __init__(self) -> None:
        self._storages: dict[int, _Storage] = {}
        self._pool_memory: dict[int, tuple[weakref.ref[Any], str]] = {}
        self._watched: list[tuple[Any, int, int]] = []
        self._bare: list[tuple[Any, int]] = []

    def add(self, tensor: torch.Tensor, op: str, line: str) -> None:
        """Note one tensor that `op` was called with."""
        storage = tensor.untyped_storage()
        entry = self._storages.get(storage._cdata)
        if entry is None or entry.ref() is None:
            if entry is not None:
                raise _freed_in_capture(entry)
            shape = tuple(tensor.shape)
            what = f"{op} at {line}: its input of shape {list(shape)}, {tensor.dtype}"
            entry = _Storage(weakref.ref(storage), storage.data_ptr(), storage.nbytes(), what)
            self._storages[storage._cdata] = entry
        if id(tensor) not in entry.tensors or entry.tensors[id(tensor)].ref() is None:
            entry.tensors[id(tensor)] = _Tensor(
                weakref.ref(tensor), tensor.data_ptr(), tensor.numel(), tuple(tensor.shape)
            )

    def add_pool_memory(self, segment: object, op: str, line: str) -> None:
        """Note that `op` was called with a tensor that another graph's capture allocated in `segment`. The tensor may
        be freed, even in this capture: its memory belongs to the other graph as long as the segment is alive."""
        self._pool_memory.setdefault(id(segment), (weakref.ref(segment), f"{op} at {line}"))

    def forget(self, storage_key: int) -> None:
        """Stop watching a storage: the graph keeps its content itself."""
        self._storages.pop(storage_key, None)

    def finish(self) -> None:
        """Watch the inputs from the end of the capture on. Raises CaptureError if one was freed during the capture."""
        for entry in self._storages.values():
            if entry.ref() is None:
                raise _freed_in_capture(entry)
        self._watch()

    def _watch(self) -> None:
        self._watched.clear()
        self._bare.clear()
        for entry in self._storages.values():
            entry.tensors = {k: t for k, t in entry.tensors.items() if t.ref() is not None}
            self._watched += [(t.ref, t.address, t.numel) for t in entry.tensors.values()]
            if not entry.tensors:
                self._bare.append((entry.ref, entry.address))

    def check(self) -> None:
        """Compare the address and size of each input with the capture's, before every replay.

        Raises:
            StaleInputError: an input was freed, moved, resized or rebound, or belonged to a graph that is gone.
        """
        for ref, what in self._pool_memory.values():
            if ref() is None:
                raise StaleInputError(
                    f"{what} reads what another graph computes, and that graph's pool is gone: keep that graph, or the "
                    f"tensor that it wrote, as long as this one"
                )
        for ref, address, numel in self._watched:
            tensor = ref()
            if tensor is None or tensor.data_ptr() != address or tensor.numel() != numel:
                self._look_closer()
                break
        for ref, address in self._bare:
            storage = ref()
            if storage is None or storage.data_ptr() != address:
                self._look_closer()
                break

    def _look_closer(self) -> None:
        """Raise StaleInputError if an input is stale. Otherwise stop watching the views that were merely dropped."""
        for entry in self._storages.values():
            storage = entry.ref()
            if storage is None:
                raise StaleInputError(
                    f"{entry.what} was freed since capture. Keep it alive as long as the graph, and write new values "
                    f"in place instead of binding a new tensor"
                )
            if storage.data_ptr() != entry.address or storage.nbytes() != entry.nbytes:
                raise StaleInputError(
                    f"{entry.what} was moved or resized since capture ({entry.nbytes} bytes then, {storage.nbytes()} "
                    f"now). Allocate it at its largest size once"
                )
            for seen in entry.tensors.values():
                tensor = seen.ref()
                if tensor is None:
                    continue
                if tensor.data_ptr() != seen.address:
                    raise StaleInputError(
                        f"{entry.what} was rebound to other memory since capture (.data or set_). Copy into it instead"
                    )
                if tensor.numel() != seen.numel:
                    raise StaleInputError(
                        f"{entry.what} was resized since capture: {list(seen.shape)} then, {list(tensor.shape)} now"
                    )
        self._watch()


def _freed_in_capture(entry: _Storage) -> CaptureError:
    return CaptureError(
        f"{entry.what} was freed before the capture ended, so a replay would read freed memory. Host data (an index "
        f"list, a fresh torch.tensor) can't be copied to a device in a capture: make it a persistent tensor before"
    )
