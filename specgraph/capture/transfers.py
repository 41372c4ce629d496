"""Copies between host and device in stream order. Only a read waits, and only for work launched before the copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specgraph.device import Platform


def write(into: Tensor, values: Sequence[Any]) -> None:
    """Copy numbers from the host to a device tensor of the same shape, without waiting for work in flight.

    The numbers go through pinned memory, since a copy from pageable memory would wait for all work launched before it.
    torch's host allocator reuses pinned memory only after the copy is done.
    """
    staged = torch.tensor(values, dtype=into.dtype, device="cpu", pin_memory=into.device.type != "cpu")
    into.copy_(staged.view(into.shape), non_blocking=True)


class HostCopy:
    """Copies one device tensor at a time to the host.

    `start` queues the copy behind the work of the current stream. `read` waits for the copy, but not for work launched
    after it.

    The current stream only copies the tensor to other device memory, and another stream copies that to the host. So the
    next launch may overwrite the tensor, and does not wait for the host's memory.
    """

    def __init__(self, platform: Platform, size: int, dtype: torch.dtype) -> None:
        """Allocate the memory of the copies. size: the number of elements of the largest tensor to copy."""
        self.host = torch.zeros(size, dtype=dtype, device="cpu", pin_memory=platform.device.type != "cpu")
        """The host memory of all copies. Each copy begins at its first element."""
        self._device = torch.zeros(size, dtype=dtype, device=platform.device)
        self._platform, self._ready, self._copied = platform, platform.event(), platform.event()
        self._views: tuple[torch.Size | None, Tensor, Tensor] = None, self._device, self.host
        """The shape of the last tensor, and its views of the device memory and of the host memory."""
        self._is_waited_for = True

    def start(self, tensor: Tensor) -> None:
        """Queue the copy of a tensor. It must have the dtype that the constructor got."""
        shape, between, result = self._views
        if tensor.shape != shape:
            between, result = (memory[: tensor.numel()].view(tensor.shape) for memory in (self._device, self.host))
            self._views = tensor.shape, between, result
        stream = self._platform.copy_stream
        if not self._is_waited_for:  # the last copy was not read, and may still be under way
            self._platform.current_stream().wait_stream(stream)
        self._is_waited_for = False
        between.copy_(tensor)
        self._ready.record(self._platform.current_stream())
        with self._platform.use(stream):
            self._ready.wait(stream)
            result.copy_(between, non_blocking=True)
            self._copied.record(stream)

    def read(self) -> Tensor:
        """Wait for the copy, and return it as a host tensor. The next `start` overwrites it."""
        if not self._is_waited_for:
            self._copied.synchronize()
            self._is_waited_for = True
        return self._views[2]
