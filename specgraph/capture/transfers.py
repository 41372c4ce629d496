"""Copies between host and device that keep stream order: only a read waits, and never for work that was launched
later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specgraph.device import Platform


def write(into: Tensor, values: Sequence[Any]) -> None:
    """Copy numbers from the host into a device tensor of the same shape, without waiting for work in flight.

    The numbers go through pinned memory: a copy from pageable memory would wait for all work launched before it.
    torch's host allocator does not hand pinned memory out again before the copy is done.
    """
    staged = torch.tensor(values, dtype=into.dtype, device="cpu", pin_memory=into.device.type != "cpu")
    into.copy_(staged.view(into.shape), non_blocking=True)


class HostCopy:
    """Copies one device tensor at a time to the host.

    `start` queues the copy in the current stream; `read` waits for the copy, and not for work launched after it.
    """

    def __init__(self, platform: Platform, size: int, dtype: torch.dtype) -> None:
        """Make the host's memory; `size` is the number of elements of the largest tensor to copy."""
        self.host = torch.zeros(size, dtype=dtype, device="cpu", pin_memory=platform.device.type != "cpu")
        """The memory of every copy, from its beginning."""
        self._platform, self._copied = platform, platform.event()
        self._result, self._is_waited_for = self.host[:0], True

    def start(self, tensor: Tensor) -> None:
        """Queue the copy of a tensor, which must have the dtype given to the constructor."""
        if tensor.shape != self._result.shape:
            self._result = self.host[: tensor.numel()].view(tensor.shape)
        self._result.copy_(tensor, non_blocking=True)
        self._is_waited_for = False
        self._copied.record(self._platform.current_stream())

    def read(self) -> Tensor:
        """Return the copy, on the host; overwritten by the next `start`."""
        if not self._is_waited_for:
            self._copied.synchronize()
            self._is_waited_for = True
        return self._result
