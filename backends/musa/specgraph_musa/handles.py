"""Streams and events of torch.musa that check what they are given.

torch.musa's own events cast any object to a stream or an event unchecked: a torch.Stream there corrupts memory instead
of raising an exception.
"""

from __future__ import annotations

from typing import Any

from specgraph.errors import PlatformError


def handle_types(musa: Any) -> tuple[type[Any], type[Any]]:
    """Subclasses of `musa.Stream` and `musa.Event` that refuse foreign handles with PlatformError."""

    class MusaEvent(musa.Event):
        def record(self, stream: Any = None) -> None:
            super().record(None if stream is None else own(musa.Stream, stream))

        def wait(self, stream: Any = None) -> None:
            super().wait(None if stream is None else own(musa.Stream, stream))

        def elapsed_time(self, end_event: Any) -> float:
            return super().elapsed_time(own(musa.Event, end_event))

    class MusaStream(musa.Stream):
        def record_event(self, event: Any = None) -> Any:
            return super().record_event(MusaEvent() if event is None else own(musa.Event, event))

        def wait_event(self, event: Any) -> None:
            super().wait_event(own(musa.Event, event))

        def wait_stream(self, stream: Any) -> None:
            super().wait_stream(own(musa.Stream, stream))

    return MusaStream, MusaEvent


def own(kind: type[Any], handle: Any) -> Any:
    """`handle`; PlatformError unless it is of torch.musa's class `kind`, Stream or Event."""
    if not isinstance(handle, kind):
        what = kind.__name__.lower()
        raise PlatformError(
            f"{handle!r} is a {type(handle).__module__}.{type(handle).__name__}, no {what} of torch.musa: torch_musa "
            f"would cast it unchecked and corrupt memory. Make it with platform.{what}()"
        )
    return handle
