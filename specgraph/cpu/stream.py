"""Streams and events of the `cpu` platform. Work runs when it is issued. Vector clocks keep the order between streams,
so that a missing wait can be reported."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from specgraph.cpu.checks.order import Clock, merge
from specgraph.errors import CaptureError, OrderError, UnsupportedError

if TYPE_CHECKING:
    from specgraph.cpu.platform import CpuPlatform
    from specgraph.cpu.recorder import Recorder


class CpuStream:
    """An ordered queue of work. Its next work is ordered after all work in `clock`."""

    def __init__(self, platform: CpuPlatform, stream_id: int) -> None:
        self._platform = platform
        self.id = stream_id
        self.clock: Clock = {stream_id: 0}

    def __repr__(self) -> str:
        return "the default stream" if self.id == 0 else f"stream {self.id}"

    def synchronize(self) -> None:
        """Wait on the host. Refused during capture."""
        self._platform.host_wait("stream.synchronize()", self)

    def query(self) -> bool:
        """Return True: work runs when it is issued. Refused during capture."""
        self._platform.refuse_in_capture("stream.query()")
        return True

    def wait_event(self, event: Any) -> None:
        """Order later work of this stream after the work that `event` recorded."""
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        """Order later work of this stream after all work issued to `stream` so far."""
        CpuEvent(self._platform, timing=False, external=False).record_and_wait(stream, self)

    def record_event(self, event: Any = None) -> Any:
        """Record `event`, or a new one, and return it."""
        event = event or self._platform.event()
        event.record(self)
        return event


class CpuEvent:
    """A point in a stream. An external event recorded or waited for inside a graph is visible outside of it."""

    def __init__(self, platform: CpuPlatform, *, timing: bool, external: bool) -> None:
        self._platform = platform
        self.timing = timing
        self.external = external
        self._clock: Clock | None = None
        self._captured: tuple[Recorder, Clock] | None = None
        self._seconds = 0.0

    def __repr__(self) -> str:
        return f"{'external event' if self.external else 'event'} {id(self):#x}"

    def record(self, stream: Any = None) -> None:
        """Mark the end of the work issued to `stream` (the current one by default) so far."""
        stream = stream or self._platform.current_stream()
        recorder = self._platform.recorder
        clock = recorder.order.clock_of(stream) if recorder else None
        if recorder and clock is not None:
            self._captured = recorder, dict(clock)
            if self.external:
                recorder.add_event(self, "record")
            return
        self._captured = None
        self.fire(stream)

    def fire(self, stream: CpuStream) -> None:
        """Take the clock of `stream`. An eager record calls it, and a replay that reaches a captured record."""
        self._clock = dict(stream.clock)
        self._seconds = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Order later work of `stream` (the current one by default) after this event, if it has been recorded."""
        stream = stream or self._platform.current_stream()
        recorder = self._platform.recorder
        inside = recorder is not None and recorder.order.clock_of(stream) is not None
        if self._captured is not None and self._captured[0].is_recording:
            owner, clock = self._captured
            if recorder is not owner:
                raise CaptureError(f"{stream} waits for {self}, which was recorded in another thread's capture")
            if inside or not self.external:
                owner.order.join(stream, clock)
            if inside and self.external:
                owner.add_event(self, "wait")
            return
        if inside and recorder is not None:
            if not self.external:
                error = CaptureError(
                    f"{stream} is being captured and waits for {self}, recorded outside of the capture: record it "
                    f"inside, or make it with platform.event(external=True)"
                )
                recorder.invalidate(error)
                raise error
            recorder.add_event(self, "wait")
            return
        if self._captured is not None and not self.external:
            raise CaptureError(f"{self} was recorded only in a capture: outside of graphs wait for an external event")
        if self._clock is not None:
            merge(stream.clock, self._clock)

    def require(self, stream: CpuStream, graph: str) -> None:
        """Wait for this event in a replay that reaches a captured wait. Raises OrderError if it was never recorded."""
        if self._clock is None:
            raise OrderError(
                f"{graph} waits for {self}, and nothing has recorded it: a device would hang here. Record it before "
                f"the replay"
            )
        merge(stream.clock, self._clock)

    def record_and_wait(self, recorded: CpuStream, waiting: CpuStream) -> None:
        self.record(recorded)
        self.wait(waiting)

    def query(self) -> bool:
        """Return True: work runs when it is issued. Refused during capture."""
        self._platform.refuse_in_capture("event.query()")
        return True

    def synchronize(self) -> None:
        """Wait on the host. Refused during capture."""
        self._platform.refuse_in_capture("event.synchronize()")
        if self._clock is not None:
            self._platform.host_knows(self._clock)

    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds from this event to `end_event`. Both need `timing=True` and a record."""
        if not (self.timing and end_event.timing):
            raise UnsupportedError("elapsed_time needs platform.event(timing=True) on both ends")
        if self._clock is None or end_event._clock is None:
            raise UnsupportedError("elapsed_time needs both events recorded")
        return (end_event._seconds - self._seconds) * 1e3
