"""The streams that take part in one capture, and whether what they touch is ordered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specgraph.cpu.checks.order import Access, Clock, conflict, merge, order_error
from specgraph.errors import CaptureError

if TYPE_CHECKING:
    from specgraph.cpu.stream import CpuStream


class CaptureOrder:
    """Begins with the stream that captures; others take part once they wait for a point of the capture."""

    def __init__(self, origin: CpuStream) -> None:
        self._origin = origin
        self._streams = {origin.id: origin}
        self._clocks: dict[int, Clock] = {origin.id: {origin.id: 0}}
        self._log: dict[int, list[tuple[int, list[Access]]]] = {}

    def clock_of(self, stream: CpuStream) -> Clock | None:
        """Return the capture's clock of `stream`, or None if the stream takes no part in it."""
        return self._clocks.get(stream.id)

    def join(self, stream: CpuStream, clock: Clock) -> None:
        """`stream` waits for a point of the capture, and so takes part in it from here on."""
        self._streams[stream.id] = stream
        merge(self._clocks.setdefault(stream.id, {stream.id: 0}), clock)

    def add(self, stream: CpuStream, accesses: list[Access]) -> None:
        """Advance the stream's clock by one op; CaptureError where the stream takes no part in the capture, OrderError
        where the op conflicts with work of another of its streams that nothing orders before it.
        """
        clock = self._clocks.get(stream.id)
        if clock is None:
            raise CaptureError(
                f"{accesses[0].label if accesses else 'an op'} runs on {stream}, which takes no part in the "
                f"capture: let it wait for the capturing stream first ({stream}.wait_stream)"
            )
        clock[stream.id] += 1
        for other, log in self._log.items():
            if other == stream.id:
                continue
            for tick, theirs in reversed(log):
                if tick <= clock.get(other, 0):
                    break
                if (found := conflict(accesses, theirs)) is not None:
                    raise order_error(found[0], str(stream), found[1], str(self._streams[other]))
        self._log.setdefault(stream.id, []).append((clock[stream.id], accesses))

    def check_joined(self) -> None:
        """Raise CaptureError, at the end, where the capturing stream does not wait for all work of another one."""
        known = self._clocks[self._origin.id]
        for stream_id, clock in self._clocks.items():
            if known.get(stream_id, 0) < clock[stream_id]:
                raise CaptureError(
                    f"{self._streams[stream_id]} was forked off the capture and never joined: let {self._origin} wait "
                    f"for it (wait_stream) before the capture ends"
                )
