"""Numbers between host and device, in the order of the stream: only who reads a result waits, and for no later work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specgraph.platforms import Platform


def write(into: Tensor, values: Sequence[Any]) -> None:
    """Copy host numbers into a device tensor of their shape, without waiting for what the device still runs.

    From pageable memory a copy would wait for all work launched before it. Pinned memory is not reused before the copy
    is done: torch's host allocator sees to that.
    """
    staged = torch.tensor(values, dtype=into.dtype, device="cpu", pin_memory=into.device.type != "cpu")
    into.copy_(staged.view(into.shape), non_blocking=True)


class HostCopy:
    """A device tensor on its way to the host, one at a time.

    `start` queues the copy in the current stream; `read` waits for it, and not for work that was launched after it.
    """

    def __init__(self, platform: Platform, size: int, dtype: torch.dtype) -> None:
        """size: elements of the largest tensor."""
        pinned = platform.device.type != "cpu"
        self._host = torch.zeros(size, dtype=dtype, device="cpu", pin_memory=pinned)
        self._platform, self._copied = platform, platform.event()
        self._result, self._is_waited_for = self._host[:0], True

    def start(self, tensor: Tensor) -> None:
        """Begin to copy a tensor of the dtype given at the start."""
        self._result, self._is_waited_for = self._host[: tensor.numel()].view(tensor.shape), False
        self._result.copy_(tensor, non_blocking=True)
        self._copied.record(self._platform.current_stream())

    def read(self) -> Tensor:
        """The copy, on the host; overwritten by the next `start`."""
        if not self._is_waited_for:
            self._copied.synchronize()
            self._is_waited_for = True
        return self._result
