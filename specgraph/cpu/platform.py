"""The `cpu` platform: streams, events and graphs on the CPU that behave like a device's."""

from __future__ import annotations

import itertools
import os
import platform as host
import threading
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from weakref import ref

import torch

from specgraph.cpu.checks.order import Clock, merge
from specgraph.cpu.checks.timeline import Timeline, TrackedWork
from specgraph.cpu.graph import CpuGraph
from specgraph.cpu.pool import CpuGraphPool, MemoryCount
from specgraph.cpu.recorder import Recorder
from specgraph.cpu.stream import CpuEvent, CpuStream
from specgraph.cpu.tasks import CpuTaskGroup, UpdateMode, entered
from specgraph.device.capabilities import Capabilities, no, quirk, yes
from specgraph.device.interface import MemoryInfo, Platform, PlatformInfo, Stream, TaskGroup
from specgraph.errors import CaptureError, PlatformError, UpdateError
from specgraph.open_generator import GeneratorRef, is_open

CAPABILITIES = Capabilities(
    graphs=yes("recorded ops, replayed at baked addresses"),
    shared_pool=yes(),
    external_events=yes("a wait that nothing has recorded is an error instead of a hang"),
    task_update=yes("a replay without an update is an error instead of a hang"),
    merged_loop=yes(),
    collectives_in_graph=quirk(
        "the ops all_reduce and all_gather of specgraph, compared between ranks; torch.distributed's own are refused"
    ),
    random_in_graph=quirk("the default generator only; an explicit generator is refused in capture"),
    host_read_detection=yes('refused in capture; .to("cpu") only when written as that literal'),
    order_detection=quirk("replays and work on other streams always; default-stream work inside platform.checked()"),
    longest_prefill=128,  # the warm-up of a pass takes seconds per 512 rows
    notes={"triton": no("Triton's kernels need a GPU")},
)


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.uses: list[tuple[CpuStream, GeneratorRef]] = []
        """The current stream of each open `use` block, and the block's generator."""
        self.recorder: Recorder | None = None


class CpuPlatform(Platform):
    """The CPU as a device. Work runs when it is issued. Its order between streams is checked."""

    graph_type = CpuGraph
    pool_type = CpuGraphPool

    def __init__(self) -> None:
        super().__init__(
            PlatformInfo(
                "cpu",
                torch.device("cpu"),
                host.processor() or host.machine(),
                {"torch": torch.__version__, "python": host.python_version()},
                "host CPU; its graphs are recorded ops, not a device's",
            )
        )
        self.memory_count = MemoryCount()
        self._stream_ids = itertools.count(1)
        self._default = CpuStream(self, 0)
        self._thread = _ThreadState()
        self.timeline = Timeline()

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    def synchronize(self) -> None:
        """See `Platform.synchronize`. All work has run already. Refused during capture, as on a device."""
        self.refuse_in_capture("platform.synchronize()")
        self.host_knows(self.timeline.everything())

    def memory(self) -> MemoryInfo:
        """See `Platform.memory`. It counts graph pools, not eager tensors; `total` and `free` are the machine's."""
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
        return MemoryInfo(self.memory_count.allocated, self.memory_count.reserved, total, _machine_free())

    def stream(self) -> CpuStream:
        return CpuStream(self, next(self._stream_ids))

    def current_stream(self) -> CpuStream:
        uses = self._thread.uses
        while uses and not is_open(uses[-1][1]):
            uses.pop()  # left by an interrupt
        return uses[-1][0] if uses else self._default

    def use(self, stream: Stream) -> AbstractContextManager[None]:
        """See `Platform.use`. The order of work is checked on all streams but the default one."""
        own: list[GeneratorRef] = []
        block = self._used(self._own(stream), own)
        own.append(ref(block.gen))
        return block

    @contextmanager
    def _used(self, stream: CpuStream, own: list[GeneratorRef]) -> Generator[None]:
        """Run a block with a current stream; `own` has a reference to this generator."""
        uses = self._thread.uses
        uses.append((stream, own[0]))
        try:
            if stream.id and not self.captures.is_here:
                with entered(TrackedWork(self)):
                    yield
            else:
                yield
        finally:
            uses.remove((stream, own[0]))

    def checked(self) -> AbstractContextManager[None]:
        """Check the order of this thread's work on the default stream too. Slower, and meant for tests."""
        return entered(TrackedWork(self))

    def event(self, *, timing: bool = False, external: bool = False) -> CpuEvent:
        return CpuEvent(self, timing=timing, external=external)

    def is_capturing(self) -> bool:
        return self.recorder is not None and self.recorder.order.clock_of(self.current_stream()) is not None

    @contextmanager
    def task_group(self) -> Generator[TaskGroup]:
        if self.recorder is None:
            raise CaptureError("task_group() belongs in a capture: there is no task to collect outside of one")
        group = self.recorder.begin_group()
        try:
            yield group
        finally:
            self.recorder.end_group()

    @contextmanager
    def task_update(self, group: TaskGroup) -> Generator[None]:
        """See `Platform.task_update`. All tasks are rewritten, or none. The last of several updates counts."""
        self.refuse_in_capture("task_update()")
        if not isinstance(group, CpuTaskGroup) or not group.is_live:
            raise UpdateError(f"{group} belongs to no captured graph of this platform (reset, closed or failed)")
        mode = UpdateMode(group)
        with entered(mode):
            yield
        mode.commit()

    # ---- used by the streams, events and graphs of this platform ---------------------------------------------------

    @property
    def recorder(self) -> Recorder | None:
        """Return the recorder of this thread's capture, if any."""
        return self._thread.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        self._thread.recorder = recorder

    def refuse_in_capture(self, what: str) -> None:
        """If this thread is capturing, make the capture fail, and raise CaptureError, as a device does. `what` is the
        call."""
        if (recorder := self.recorder) is not None:
            error = CaptureError(f"{what} is not allowed in a capture: do it before, or after")
            recorder.invalidate(error)
            raise error

    def host_wait(self, what: str, stream: CpuStream) -> None:
        """Note that the host waits for `stream`: all work issued from now on is ordered after the stream's work."""
        self.refuse_in_capture(what)
        self.host_knows(stream.clock)

    def host_knows(self, clock: Clock) -> None:
        """Note that the host has waited for the work in `clock`: all work issued from now on is ordered after it."""
        merge(self.timeline.host, clock)

    def _own(self, stream: Stream) -> CpuStream:
        if not isinstance(stream, CpuStream):
            raise PlatformError(f"{stream!r} is no stream of the cpu platform: make one with platform.stream()")
        return stream


def _machine_free() -> int:
    """Return the bytes that a new allocation can have, as Linux reports them. 0 on other systems."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return 0
