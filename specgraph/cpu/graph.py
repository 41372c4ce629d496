"""A captured graph: the recorded ops in order, and the checks before they run."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import itertools
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes, _pop_mode, _push_mode

from specgraph.cpu.checks.inputs import Inputs
from specgraph.cpu.checks.order import Access, Region
from specgraph.cpu.checks.refusals import HostReadMode
from specgraph.cpu.pool import CpuGraphPool
from specgraph.cpu.recorder import EventNode, Recorder
from specgraph.cpu.tasks import CpuTaskGroup, Task
from specgraph.device.graph import Graph
from specgraph.dispatch_mode import tensors_in
from specgraph.user_code import user_line

if TYPE_CHECKING:
    from specgraph.cpu.platform import CpuPlatform

_numbers = itertools.count(1)


@dataclass(slots=True)
class Part:
    """The ops between two external events. `accesses`: their accesses to memory that other streams can touch too."""

    tasks: list[Task] = field(default_factory=list[Task])
    accesses: list[Access] = field(default_factory=list[Access])
    then: EventNode | None = None

    def run(self) -> None:
        """Run the ops. If one fails, its own error is raised, with a note of the line that captured it."""
        for task in self.tasks:
            try:
                task.call()
            except Exception as error:
                add_note: Callable[[str], None] | None = getattr(error, "add_note", None)  # from Python 3.11 on
                if add_note is not None:
                    add_note(f"raised by {task.func}, captured at {task.line}, during a graph's replay")
                raise


@dataclass(slots=True)
class _Captured:
    """The result of a capture. Its tasks refer to the pool's blocks by address; the pool keeps the blocks mapped."""

    parts: list[Part]
    groups: list[CpuTaskGroup]
    inputs: Inputs
    constants: list[torch.Tensor]


class CpuGraph(Graph):
    """A graph of recorded ops. Made by `CpuPlatform.graph()`."""

    platform: CpuPlatform
    pool: CpuGraphPool

    def __init__(self, platform: CpuPlatform, pool: CpuGraphPool, *, owns_pool: bool = False) -> None:
        super().__init__(platform, pool, owns_pool=owns_pool)
        self.number = next(_numbers)
        self._recorder: Recorder | None = None
        self._modes = ExitStack()
        self._captured: _Captured | None = None
        self._line = ""

    def __repr__(self) -> str:
        return f"graph {self.number}" + (f" (captured at {self._line})" if self._captured else "")

    @property
    def num_tasks(self) -> int:
        """Return the number of ops that one replay runs."""
        return sum(len(p.tasks) for p in self._captured.parts) if self._captured else 0

    def _begin(self, handle: Any) -> None:
        self._line = user_line()
        stream = self.platform.current_stream()
        self._recorder = self.platform.recorder = Recorder(self.platform, self.pool, stream)
        self._modes.enter_context(_recording(self._recorder))

    def _end(self) -> None:
        recorder, self.platform.recorder = self._recorder, None
        self._modes.close()
        assert recorder is not None
        recorder.finish()
        parts = _compile(recorder)
        recorder.is_recording, self._recorder = False, None
        self._captured = _Captured(parts, recorder.groups, recorder.inputs, recorder.constants)

    def _abandon(self, began: bool) -> None:
        recorder, self._recorder, self.platform.recorder = self._recorder, None, None
        self._modes.close()
        if recorder is not None:
            recorder.is_recording = False
            recorder.nodes.clear()
            for group in recorder.groups:
                group.is_live = False

    def _launch(self) -> None:
        """Run the ops in this thread, in order, outside of all dispatch and function modes."""
        captured = self._captured
        assert captured is not None
        if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                self._run(captured)
        else:
            self._run(captured)

    def _run(self, captured: _Captured) -> None:
        captured.inputs.check()
        for group in captured.groups:
            group.require_update()
        stream = self.platform.current_stream()
        # Not `torch.inference_mode()`: its `__exit__` is Python, and an interrupt there would leave the mode on.
        with torch._C._InferenceMode(True):
            for number, part in enumerate(captured.parts):
                self.platform.timeline.replay(self, number, part.accesses, stream)
                part.run()
                if part.then is not None:
                    if part.then.kind == "record":
                        part.then.event.fire(stream)
                    else:
                        part.then.event.require(stream, str(self))
        for group in captured.groups:
            group.is_updated = False

    def _destroy(self) -> None:
        """Drop the ops. Tensors that the capture returned keep their memory."""
        captured, self._captured = self._captured, None
        if captured is not None:
            for group in captured.groups:
                group.is_live = False
            self.platform.timeline.forget(self)


@contextmanager
def _recording(recorder: Recorder) -> Generator[None]:
    """Enter the recorder below all active dispatch modes, so that each of these modes sees every op once."""
    with ExitStack() as stack:
        above: list[Any] = [_pop_mode() for _ in range(torch._C._len_torch_dispatch_stack())]
        try:
            recorder.__enter__()
        finally:
            for mode in reversed(above):
                _push_mode(mode)
        stack.callback(_leave, recorder)
        stack.enter_context(HostReadMode(recorder.invalidate))
        yield


def _leave(recorder: Recorder) -> None:
    above: list[Any] = []
    while (mode := _pop_mode()) is not recorder:
        above.append(mode)
    _push_mode(recorder)
    recorder.__exit__(None, None, None)
    for mode in reversed(above):
        _push_mode(mode)


def _drop_unread_outputs(recorder: Recorder) -> None:
    """Drop the result blocks that no later op and no living tensor uses, so that no replay copies results there."""
    read: set[int] = set()
    for node in reversed(recorder.nodes):
        if not isinstance(node, Task):
            continue
        node.outputs = [
            (i, block)
            for i, block in node.outputs
            if (base := block.untyped_storage().data_ptr()) in read or recorder.pool.allocated_by(base) is not None
        ]
        read.update(t.untyped_storage().data_ptr() for t in tensors_in(node.args, list(node.kwargs.values())))


def _compile(recorder: Recorder) -> list[Part]:
    _drop_unread_outputs(recorder)
    parts = [Part()]
    for node in recorder.nodes:
        if isinstance(node, EventNode):
            parts[-1].then = node
            parts.append(Part())
            continue
        node.compile()
        parts[-1].tasks.append(node)
    for part in parts:
        part.accesses = _outside(part.tasks, recorder.pool)
    return parts


def _outside(tasks: list[Task], pool: CpuGraphPool) -> list[Access]:
    """Return the accesses that can conflict with other work: to storages that are alive, and one to the pool as a
    whole."""
    token = -id(pool)
    whole = Access(Region(token, token, token + 1, (1,), (1,), 1), True, "a replay of a graph in the same pool")
    found: dict[tuple[Region, bool], Access] = {}
    for task in tasks:
        for access in task.accesses:
            if not pool.covers(access.region.start) or pool.allocated_by(access.region.base) is not None:
                found.setdefault((access.region, access.write), access)
        task.accesses = []
    return [whole, *found.values()] if tasks else []
