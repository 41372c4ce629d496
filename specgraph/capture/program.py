"""Programs: the device work of one kind of pass as plain tensor code, and the persistent tensors that it uses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from torch import Tensor

from specgraph.capture.attend import MakeAttend
from specgraph.capture.dispatch import BatchDescriptor, Phase

Work = Callable[[Sequence[int], MakeAttend], None]
"""`work(steps, make_attend)` runs some steps of a program on buffers that are sliced to one batch."""

StepKind = Literal["together", "alike", "distinct"]
"""The ways to capture the steps of a program.

- together: always in one launch.
- alike: all later draft steps are the same computation, so one captured step is replayed for each of them.
- distinct: the draft steps differ, so each has a graph of its own."""


class Program(ABC):
    """One kind of pass of one model: a prefill chunk, a verify or a propose. It knows no device, no graph and no
    lowering."""

    phase: Phase
    """The phase of its batches."""
    step_kind: StepKind = "together"

    @property
    def later_rows(self) -> int:
        """Return the rows per request of a later step. It is used only if `step_kind` is "alike"."""
        return 1

    def num_steps(self, batch: BatchDescriptor) -> int:
        """Return the number of steps: forward passes with attention. Their numbers, from 0, are the keys of host
        lengths."""
        return 1

    @abstractmethod
    def batches(self) -> list[BatchDescriptor]:
        """Return the padded batches to capture, largest first."""

    @abstractmethod
    def work_of(self, batch: BatchDescriptor) -> Work:
        """Return the work of this batch, over views of the program's buffers."""

    @abstractmethod
    def make_inert(self) -> None:
        """Turn every row of the buffers into padding, since the warm-up before a capture really runs."""

    @abstractmethod
    def named_tensors(self) -> Mapping[str, Tensor]:
        """Return every persistent tensor that the work touches besides weights and KV caches, by name."""
