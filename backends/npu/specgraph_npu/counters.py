"""What a platform has issued so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Counters:
    """Calls issued through one platform. Copies and host time belong to whoever copies and measures."""

    graph_launches: int = 0
    task_updates: int = 0
    event_records: int = 0
    """Gates opened, ends of launches, and records of events that the platform handed out."""
    event_synchronizes: int = 0
    """Host waits for one event."""
    synchronizes: int = 0
    """Host waits for the whole device."""


def counted_event(event_type: Any, counters: Counters) -> Any:
    """The vendor's event type, with records and host waits counted."""

    class CountedEvent(event_type):
        def record(self, stream: Any = None) -> None:
            counters.event_records += 1
            super().record(stream)

        def synchronize(self) -> None:
            counters.event_synchronizes += 1
            super().synchronize()

    return CountedEvent
