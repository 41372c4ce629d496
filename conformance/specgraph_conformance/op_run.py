"""Runs rows of the op table on a device, eagerly or also in a graph, with guards around each tensor's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from specgraph.device import Platform
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from specgraph_conformance.linear_oracles import TOLERANCE
from specgraph_conformance.op_table import Run
from specgraph_conformance.rig import captured, on_host

GUARD = 512
"""The bytes before and after each tensor's memory. It is a multiple of every alignment that kernels require."""


class Memory:
    """The device's copy of one host tensor's memory, between two guards. All bits of a guard are set.

    A guard is thus NaN in every floating dtype and -1 in every integer dtype, so that reading it shows too, not only
    writing it.
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
        """Return the device's copy of a host tensor in this memory, with the same strides."""
        return self._place(self._there, tensor)

    def load(self) -> None:
        """Copy the host's values to the device, and set the guards."""
        self._there.copy_(self._given)

    def clear(self) -> None:
        """Set all values and the guards to zero."""
        self._there.zero_()

    def store(self, written: list[Tensor], what: str) -> None:
        """Copy the device's values to the host.

        Args:
            written: the tensors in this memory that may have new values. All other bytes must be unchanged.
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


class Call:
    """A call of an op on a platform, with copies of the host's tensors between guards."""

    def __init__(self, platform: Platform, op: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.platform, self.op, self.results = platform, op, None
        tensors: list[Tensor] = [leaf for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)]
        self.memory = {_key(tensor): Memory(tensor, platform.device) for tensor in tensors}
        self.args, self.kwargs = tree_map_only(Tensor, self.there, (args, kwargs))

    def there(self, tensor: Tensor) -> Tensor:
        """Return the device's copy of one of the host's tensors."""
        return self.memory[_key(tensor)].view(tensor)

    def issue(self) -> None:
        """Call the op."""
        self.results = self.op(*self.args, **self.kwargs)

    def load(self) -> None:
        """Copy the host's values to all tensors."""
        for each in self.memory.values():
            each.load()

    def seen(self) -> Any:
        """Wait until the device is idle, and return the results of the last call in host memory."""
        self.platform.synchronize()
        return tree_map_only(Tensor, on_host, self.results)

    def store(self, written: list[Tensor]) -> None:
        """Copy the written tensors to the host, and check that the op wrote nothing else."""
        for number, (key, each) in enumerate(self.memory.items(), 1):
            each.store([tensor for tensor in written if _key(tensor) == key], f"tensor {number} of the call")


def run_on(platform: Platform) -> Run:
    """Return a `Run` that runs each op eagerly on a platform."""

    def run(op: Callable[..., Any], *args: Any, written: Iterable[Tensor] = (), **kwargs: Any) -> Any:
        call = Call(platform, op, args, kwargs)
        call.load()
        call.issue()
        seen = call.seen()
        call.store(list(written))
        return seen

    return run


class RunInGraph:
    """Runs each op eagerly and then in a graph, and returns the results of the replay.

    The graph is captured while all tensors are zero, and replayed with their real values: baked-in values would show.
    The capture follows an eager run on the capture stream, like a host engine's warm-up, because a device's libraries
    may not be initialised in a capture.
    """

    def __init__(self, platform: Platform) -> None:
        self.platform = platform
        self.differs = ""
        """The difference between the last replay and the eager run, in words. Empty if there is none."""

    def __call__(self, op: Callable[..., Any], *args: Any, written: Iterable[Tensor] = (), **kwargs: Any) -> Any:
        written, call = list(written), Call(self.platform, op, args, kwargs)
        self.platform.synchronize()
        with self.platform.use(self.platform.capture_stream):
            call.load()
            call.issue()
            first = call.seen(), [on_host(call.there(tensor)) for tensor in written]
        for each in call.memory.values():
            each.clear()
        graph = captured(self.platform, call.issue, warm_up=False)
        call.load()
        graph.replay()
        seen = call.seen()
        replayed = seen, [on_host(call.there(tensor)) for tensor in written]
        graph.close()
        name = getattr(getattr(op, "func", op), "__name__", op)
        for a, b in zip(tree_leaves(first), tree_leaves(replayed), strict=True):
            if torch.is_tensor(a) and not _agree(a, b):
                self.differs = f"{name} gives other values in a replay than at once on the capture stream"
        call.store(written)
        return seen


def _agree(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal. Floats may differ by the rounding of sums in another order."""
    if not a.is_floating_point() or a.numel() == 0:
        return torch.equal(a, b)
    first, second, tolerance = a.double(), b.double(), TOLERANCE.get(a.dtype, 0.15)
    largest = float(second.nan_to_num(0, 0, 0).abs().max())
    return torch.allclose(first, second, rtol=tolerance, atol=tolerance * largest, equal_nan=True)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def _words(tensor: Tensor) -> Tensor:
    """Return a view of a tensor's bytes as the widest integers that fit."""
    return tensor.view(torch.int64 if tensor.nbytes % 8 == 0 else torch.uint8)


def _key(tensor: Tensor) -> tuple[int, torch.dtype]:
    """Return the identity of a tensor's memory: tensors with the same key share it."""
    return tensor.untyped_storage().data_ptr(), tensor.dtype
