"""Runs a row of the op table on a device, with its tensors between guards."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from specgraph.device import Platform
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from specgraph_conformance.op_table import Run
from specgraph_conformance.rig import captured, on_host

GUARD = 512
"""Bytes before and behind each tensor's memory, a multiple of every alignment that kernels ask for."""


class Memory:
    """The device's copy of one host tensor's memory, between guards whose bytes are all ones.

    A guard is NaN in every floating dtype and -1 in every integer, so that reading it shows as writing it does.
    """

    def __init__(self, tensor: Tensor, device: torch.device) -> None:
        size, storage = tensor.element_size(), tensor.untyped_storage()
        self._held = torch.empty(0, dtype=tensor.dtype).set_(storage, 0, (storage.nbytes() // size,), (1,))
        self._first, self._end = GUARD // size, GUARD // size + len(self._held)
        ones = 1 if tensor.dtype == torch.bool else 255  # a bool is 0 or 1
        guard = torch.full((GUARD,), ones, dtype=torch.uint8)
        self._given = torch.cat((guard, _bytes(self._held), guard)).view(tensor.dtype)
        self._there = torch.zeros_like(self._given, device=device)

    def view(self, tensor: Tensor) -> Tensor:
        """The device's copy of a host tensor of this memory, with the same strides."""
        return self._place(self._there, tensor)

    def load(self) -> None:
        """Copy the host's values, and set the guards."""
        self._there.copy_(self._given)

    def store(self, written: list[Tensor], what: str) -> None:
        """Copy the device's values to the host.

        Args:
            written: tensors of this memory that may have other values now.
        """
        now, before = self._there.cpu(), self._given
        if torch.equal(_words(now), _words(before)):
            return
        changed = (_bytes(now) != _bytes(before)).view(len(now), -1).any(1)
        for tensor in written:
            self._place(changed, tensor).fill_(False)
        wrong = [index - self._first for index in changed.nonzero()[:, 0].tolist()]
        beside = [index for index in wrong if not 0 <= index < len(self._held)]
        assert not beside, f"{what} of {len(self._held)} values was written at place {beside[0]}"
        assert not wrong, f"{what} was written at place {wrong[0]}, where the op writes nothing"
        self._held.copy_(now[self._first : self._end])

    def _place(self, whole: Tensor, tensor: Tensor) -> Tensor:
        return whole.as_strided(tensor.size(), tensor.stride(), self._first + tensor.storage_offset())


def run_on(platform: Platform, way: str) -> Run:
    """Return what runs ops on a platform, eagerly or in a graph.

    The graph is captured while all tensors are zero, and replayed with their values: nothing of them is baked in. The
    capture follows a warm-up on the capture stream, as an engine's does: a device's libraries may not be set up in a
    capture.
    """

    def run(op: Callable[..., Any], *args: Any, written: Iterable[Tensor] = (), **kwargs: Any) -> Any:
        tensors: list[Tensor] = [leaf for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)]
        memory = {_key(tensor): Memory(tensor, platform.device) for tensor in tensors}
        there: Any = tree_map_only(Tensor, lambda tensor: memory[_key(tensor)].view(tensor), (args, kwargs))
        results: Any = None

        def call() -> None:
            nonlocal results
            results = op(*there[0], **there[1])

        graph = None if way == "eager" else captured(platform, call)
        for each in memory.values():
            each.load()
        if graph is None:
            call()
        else:
            graph.replay()
        platform.synchronize()
        seen = tree_map_only(Tensor, on_host, results)
        if graph is not None:
            graph.close()
        for number, (key, each) in enumerate(memory.items(), 1):
            each.store([tensor for tensor in written if _key(tensor) == key], f"tensor {number} of the call")
        return seen

    return run


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def _words(tensor: Tensor) -> Tensor:
    """View a tensor's bytes as the widest integers that fit."""
    return tensor.view(torch.int64 if tensor.nbytes % 8 == 0 else torch.uint8)


def _key(tensor: Tensor) -> tuple[int, torch.dtype]:
    """Tensors with the same key share their memory."""
    return tensor.untyped_storage().data_ptr(), tensor.dtype
