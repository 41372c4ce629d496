"""The records file of a running suite: one JSON object per line, written at once; a crash or a hang loses nothing.

{"event": "session", ...Subject, "problems": [...], "shard": {...} | null,
 "planned": [{"id", "property", ..., "xfail": reason | null}]}
{"event": "start", "id": ...}
{"event": "result", ...CaseResult}
{"event": "expired", "id": ..., "seconds": ...}        this case passed its time limit
{"event": "unhealthy", "id": ..., "reason": ...}       the device did not survive this case
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from specgraph_conformance.report import CaseResult


class RecordFile:
    """Appends to one records file; flushed line by line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, event: str, data: Mapping[str, Any]) -> None:
        """Append one record."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, **data}) + "\n")

    def read(self) -> Iterator[dict[str, Any]]:
        """All records so far; a line cut off by a crash is dropped."""
        if not self.path.exists():
            return
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                continue

    def results(self) -> dict[str, CaseResult]:
        """Finished cases by id."""
        found: dict[str, CaseResult] = {}
        for record in self.read():
            if record.pop("event") == "result":
                found[record["id"]] = CaseResult(**record)
        return found

    def expired(self, case_id: str) -> bool:
        """Whether a case passed its time limit."""
        return any(record["event"] == "expired" and record["id"] == case_id for record in self.read())

    def unfinished(self) -> str | None:
        """The case that was started last and has no result."""
        started: str | None = None
        for record in self.read():
            if record["event"] == "start":
                started = record["id"]
            elif record["event"] == "result" and record["id"] == started:
                started = None
        return started
