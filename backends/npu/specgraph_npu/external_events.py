"""External events: semaphores that streams and running graphs wait at, and that a wait closes again.

torch_npu builds its ExternalEvent in two ways. Where the runtime can wait for values, a wait closes the event as it
passes, and each issued record takes one wait. Where it can't, the event is created by its first record, a wait captured
before that is dropped without a word, and an open event stays open until it is reset.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specgraph_npu.platform import NpuPlatform


class Gates:
    """Makes external events.

    Without value waits each is recorded once and reset, so that it exists before it is captured. The reset is in the
    order of `stream`, and what waits first must come after it: see `first_wait`.
    """

    def __init__(self, platform: NpuPlatform, created_at_once: bool, stream: Any) -> None:
        """stream: a queue that never waits for anything."""
        self._platform, self._created_at_once, self.stream = platform, created_at_once, stream

    def take(self) -> Any:
        """A closed gate for a task group: the vendor's object, whose captured wait needs a captured reset."""
        gate = self._platform.npu.ExternalEvent()
        if not self._created_at_once:
            gate.record(self.stream)
            gate.reset(self.stream)
        return gate

    def event(self) -> Any:
        """A closed event for `Platform.event`."""
        gate = self.take()
        if self._created_at_once:
            return gate
        if not self._platform.is_capturing():
            self.stream.synchronize()
        return ClosingEvent(gate, self._platform)

    def first_wait(self, stream: Any) -> None:
        """Before a graph's first launch on `stream`: its gates are closed before it waits or an update opens."""
        if not self._created_at_once:
            stream.wait_stream(self.stream)
            self._platform.update_stream.wait_stream(self.stream)


class ClosingEvent:
    """An external event that a wait closes as it passes, where the vendor's stays open."""

    def __init__(self, event: Any, platform: NpuPlatform) -> None:
        self._event, self._platform = event, platform

    def record(self, stream: Any = None) -> None:
        """Open it. See `Event.record`."""
        self._event.record(self._platform.current_stream() if stream is None else stream)

    def wait(self, stream: Any = None) -> None:
        """Wait until it is open, and close it. See `Event.wait`."""
        stream = self._platform.current_stream() if stream is None else stream
        self._event.wait(stream)
        self._event.reset(stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._event, name)
