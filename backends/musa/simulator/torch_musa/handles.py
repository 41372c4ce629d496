"""Streams and events. As in 2.7.1, an event casts what it is given without a check."""

from contextlib import nullcontext

from torch_musa import form, simulated
from torch_musa.device import index_of

__all__ = ["Event", "Stream", "current_stream", "default_stream", "stream"]


class Stream(form.StreamBase):
    def __new__(cls, device=None, priority=0, **kwargs):
        return super().__new__(cls, priority=priority, **kwargs)

    def wait_event(self, event):
        event.wait(self)

    def record_event(self, event=None):
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_stream(self, stream):
        self.wait_event(stream.record_event())

    def query(self):
        return super().query()

    def synchronize(self):
        super().synchronize()

    def __eq__(self, other):
        return isinstance(other, Stream) and super().__eq__(other)

    def __hash__(self):
        return hash(self.musa_stream)

    def __repr__(self):
        return f"torch_musa.Stream device={self.device} musa_stream={self.musa_stream:#x} (simulated)"


class Event(form.EventBase):
    def __new__(cls, enable_timing=False, blocking=False, interprocess=False):
        return super().__new__(cls, enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)

    def record(self, stream=None):
        super().record(_cast(current_stream() if stream is None else stream, Stream, "record"))

    def wait(self, stream=None):
        super().wait(_cast(current_stream() if stream is None else stream, Stream, "wait"))

    def query(self):
        return super().query()

    def elapsed_time(self, end_event):
        return super().elapsed_time(_cast(end_event, Event, "elapsed_time"))

    def synchronize(self):
        super().synchronize()


def _cast(handle, kind, where):
    if isinstance(handle, kind):
        return handle
    what = f"{type(handle).__module__}.{type(handle).__name__} given to a musa event's {where} as a {kind.__name__}"
    if simulated.defects.handles_unchecked:
        simulated.corrupt(what)
    raise TypeError(what)


def stream(stream):
    return nullcontext() if stream is None else form.use(stream)


def _by_id(number):
    return Stream(stream_id=number[0], device_index=number[1], device_type=number[2])


def current_stream(device=None):
    return _by_id(form.current_stream_id(index_of(device)))


def default_stream(device=None):
    return _by_id(form.default_stream_id(index_of(device)))
