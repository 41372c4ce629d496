"""Programs: what one launchable unit computes, as plain tensor code, and the persistent tensors that it works on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from torch import Tensor

from specgraph.capture.attend import MakeAttend
from specgraph.capture.dispatch import BatchDescriptor, Phase

Work = Callable[[Sequence[int], MakeAttend], None]
"""The device work of some steps of a program, on buffers that were sliced to one batch."""

StepKind = Literal["together", "alike", "distinct"]
"""The ways in which the steps of a program may be captured. together: always in one launch. alike: a draft loop whose
later steps are the same computation, so that one captured step is replayed for all of them. distinct: a draft loop
whose later steps differ, so that each has a graph of its own."""


class Program(ABC):
    """One kind of pass of one model: the prefill of a prompt's rows, a verify, a propose. It knows no device, no graph
    and no lowering."""

    phase: Phase
    """The phase of its batches."""
    step_kind: StepKind = "together"

    @property
    def later_rows(self) -> int:
        """Return the rows per request in each step after the first, where these are alike."""
        return 1

    def num_steps(self, batch: BatchDescriptor) -> int:
        """Return the number of forward passes with attention, numbered from 0: what host lengths are keyed by."""
        return 1

    @abstractmethod
    def batches(self) -> list[BatchDescriptor]:
        """Return the padded batches to capture, largest first."""

    @abstractmethod
    def work_of(self, batch: BatchDescriptor) -> Work:
        """Return the work over views of the program's buffers for this batch."""

    @abstractmethod
    def make_inert(self) -> None:
        """Make every row of every batch padding: the warm-up before a capture really runs."""

    @abstractmethod
    def named_tensors(self) -> Mapping[str, Tensor]:
        """Return every persistent tensor that the work touches besides weights and KV caches, by name."""
