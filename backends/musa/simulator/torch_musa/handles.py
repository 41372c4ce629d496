"""Streams and events (2.7.1: core/stream.py, csrc/core/Stream.cpp, csrc/core/Event.cpp).

An event casts its arguments without a check (2.7.1: csrc/core/Event.cpp:122-157). There are 32 streams, handed out in
turn (2.7.1: csrc/core/MUSAStream.cpp:17-18).
"""

from contextlib import nullcontext
from itertools import cycle

import torch

from torch_musa import simulated
from torch_musa.runtime import errors, platform

__all__ = ["Event", "Stream", "current_stream", "default_stream", "stream"]

STREAMS = 32
_streams = [platform.current_stream(), *(platform.stream() for _ in range(STREAMS))]
_turn = cycle(range(1, 1 + STREAMS))


class Stream(torch.Stream):
    """The stream with the given id, or else the next one in turn of the runtime's 32 streams."""

    def __new__(cls, device=None, priority=0, **kwargs):
        number = kwargs["stream_id"] if "stream_id" in kwargs else next(_turn)
        self = super().__new__(cls, stream_id=number, device_index=0, device_type=0)
        self.recorded = _streams[number]
        return self

    @property
    def device(self):
        return torch.device("cpu")

    @property
    def musa_stream(self):
        return self.recorded.id

    def wait_event(self, event):
        event.wait(self)

    def record_event(self, event=None):
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_stream(self, stream):
        self.wait_event(stream.record_event())

    def query(self):
        with errors():
            return self.recorded.query()

    def synchronize(self):
        with errors():
            self.recorded.synchronize()

    def __eq__(self, other):
        return isinstance(other, Stream) and self.recorded is other.recorded

    def __hash__(self):
        return hash(self.musa_stream)


class Event:
    def __new__(cls, enable_timing=False, blocking=False, interprocess=False):
        self = super().__new__(cls)
        self.recorded = platform.event(timing=enable_timing)
        return self

    def record(self, stream=None):
        with errors():
            self.recorded.record(_cast(current_stream() if stream is None else stream, Stream, "record").recorded)

    def wait(self, stream=None):
        with errors():
            self.recorded.wait(_cast(current_stream() if stream is None else stream, Stream, "wait").recorded)

    def query(self):
        with errors():
            return self.recorded.query()

    def elapsed_time(self, end_event):
        return self.recorded.elapsed_time(_cast(end_event, Event, "elapsed_time").recorded)

    def synchronize(self):
        with errors():
            self.recorded.synchronize()


def _cast(handle, kind, where):
    if isinstance(handle, kind):
        return handle
    simulated.corrupt(
        f"{type(handle).__module__}.{type(handle).__name__} given to a musa event's {where} as a {kind.__name__}"
    )


def stream(stream):
    return nullcontext() if stream is None else platform.use(stream.recorded)


def current_stream(device=None):
    return Stream(stream_id=_streams.index(platform.current_stream()))


def default_stream(device=None):
    return Stream(stream_id=0)
