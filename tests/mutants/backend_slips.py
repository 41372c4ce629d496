"""Slips of a backend that suites up to 1.2 passed: values in too few bits, memory handed out twice, state of the device
instead of the graph."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from mutants.registry import mutant
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from specgraph.cpu.baking import map_tensors
from specgraph.cpu.graph import CpuGraph
from specgraph.cpu.platform import CpuPlatform
from specgraph.cpu.recorder import Recorder
from specgraph.cpu.tasks import Task
from specgraph.device.interface import Platform
from specgraph.dispatch_mode import tensors_in


def _narrow(value: Any, bits: int) -> Any:
    """Integers, and those in lists, as a signed number of that many bits holds them."""
    if isinstance(value, (list, tuple)):
        return type(value)([_narrow(each, bits) for each in value])
    if type(value) is int:
        return (value + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)
    return value


@mutant("small-inputs-baked", "specgraph.cpu.recorder:Recorder._append")
def small_inputs_by_value(real: Any, self: Any, call: Any, *rest: Any) -> None:
    """Tensors of up to 8 bytes from outside of a capture are passed to its kernels by value."""

    def by_value(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.nbytes() > 8 or self._owns(storage) or call.func._schema.is_mutable:
            return tensor
        with _disable_current_modes():
            self.constants.append(tensor.clone())
        return self.constants[-1]

    args, kwargs = map_tensors((call.args, call.kwargs), by_value)
    real(self, call._replace(args=args, kwargs=kwargs, given=tensors_in(args, list(kwargs.values()))), *rest)


@mutant("integers-in-32-bits", "specgraph.cpu.tasks:Task.compile")
def integers_of_32_bits(real: Any, self: Task) -> None:
    """Python integers of captured ops are kept in 32 bits."""
    if self.func._schema.name in ("aten::add", "aten::sub", "aten::mul", "aten::eq"):
        self.args = _narrow(self.args, 32)
    real(self)


@mutant("close-ends-other-platforms")
def close_resets_the_device(patch: pytest.MonkeyPatch) -> None:
    """close() of a platform drops what all platforms of its device have captured."""
    graphs: weakref.WeakSet[CpuGraph] = weakref.WeakSet()
    end, close = CpuGraph._end, CpuPlatform.close

    def keep(self: CpuGraph) -> None:
        end(self)
        graphs.add(self)

    def close_all(self: Platform) -> None:
        close(self)  # type: ignore[arg-type]
        for graph in list(graphs):
            graph.close()

    patch.setattr(CpuGraph, "_end", keep)
    patch.setattr(CpuPlatform, "close", close_all)


@mutant("capture-moves-the-generator", "specgraph.cpu.graph:CpuGraph._end")
def capture_draws_a_number(real: Any, self: CpuGraph) -> None:
    """The end of a capture advances the default generator."""
    real(self)
    torch.rand(1)


@mutant("update-in-16-bits", "specgraph.cpu.tasks:UpdateMode.commit")
def lengths_of_16_bits(real: Any, self: Any) -> None:
    """Lists of an update are kept in 16 bits with a sign."""

    def narrow(value: Any) -> Any:
        return _narrow(value, 16) if isinstance(value, list) else value

    self._new = [
        (tuple(map(narrow, args)), {name: narrow(value) for name, value in kwargs.items()})
        for args, kwargs in self._new
    ]
    real(self)


@mutant("graph-cut-off", "specgraph.cpu.recorder:Recorder.finish")
def nodes_from_4096_dropped(real: Any, self: Recorder) -> None:
    """A graph keeps 4,096 nodes and drops the others without an error."""
    real(self)
    del self.nodes[4096:]


@mutant("special-values-lost", "specgraph.cpu.tasks:Task.compile")
def results_are_finite(real: Any, self: Task) -> None:
    """Results of captured float32 ops are clamped to finite values."""
    real(self)
    _change_results(self, lambda result: result.clamp_(*(-3.4028234e38, 3.4028234e38)))


@mutant("special-values-lost-nan", "specgraph.cpu.tasks:Task.compile")
def nan_becomes_zero(real: Any, self: Task) -> None:
    """Results of captured float32 ops have 0 for NaN."""
    real(self)
    _change_results(self, lambda result: result.masked_fill_(result.isnan(), 0.0))


def _change_results(task: Task, change: Callable[[Tensor], object]) -> None:
    """Make a recorded op change its new float32 results after it ran."""
    call, results = task.call, [each for _, each in task.outputs if each.dtype == torch.float32]

    def run() -> None:
        call()
        for each in results:
            change(each)

    if results:
        task.call = run


@mutant("update-of-one-list", "specgraph.cpu.tasks:UpdateMode.commit")
def only_the_last_list_is_rewritten(real: Any, self: Any) -> None:
    """An update rewrites the last list of an op, the lengths of contexts, and leaves the numbers of rows."""
    if len(self._new) == len(self._group.tasks):
        self._new = [
            (_last_list_of(args, task.args), kwargs)
            for (args, kwargs), task in zip(self._new, self._group.tasks, strict=True)
        ]
    real(self)


def _last_list_of(new: tuple[Any, ...], old: tuple[Any, ...]) -> tuple[Any, ...]:
    lists = [i for i, each in enumerate(new) if isinstance(each, list)]
    return tuple(old[i] if i in lists[:-1] else each for i, each in enumerate(new))


@mutant("failed-update-opens-gate", "specgraph.cpu.platform:CpuPlatform.task_update")
@contextmanager
def failed_update_opens_the_gate(real: Any, self: CpuPlatform, group: Any) -> Generator[None]:
    """An update opens the gate of its group also where its block raised."""
    try:
        with real(self, group):
            yield
    finally:
        group.is_updated = True
