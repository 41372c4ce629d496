"""What a platform has issued so far."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace


@dataclass(slots=True)
class Counters:
    """Calls issued through one platform. Copies and host time belong to whoever copies and measures."""

    graph_launches: int = 0
    task_updates: int = 0
    event_records: int = 0
    synchronizes: int = 0

    def snapshot(self) -> Counters:
        """The numbers now."""
        return replace(self)

    def since(self, earlier: Counters) -> Counters:
        """What was issued after `earlier`."""
        return Counters(**{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)})
