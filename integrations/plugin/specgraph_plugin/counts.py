"""Counts proposes by the code that drafted: specgraph, or the host engine's own."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Annotated

from specgraph.validation import Range, check, checked_fields


@checked_fields
@dataclass(slots=True)
class ProposeCounts:
    """Counts proposes of specgraph and of the host engine's own code, and logs the counts from time to time."""

    log: logging.Logger
    log_every: Annotated[int, Range(0)] = 10_000
    """Proposes between two lines of the log. 0 logs nothing."""
    by_reason: Counter[str] = field(default_factory=Counter[str])
    """Proposes by key: "specgraph", or the reason why the host engine drafted."""

    def add(self, reason: str | None) -> None:
        """Count one propose. `reason` says why the host engine drafted. It is None if specgraph drafted."""
        if reason is not None and type(reason) is not str:
            reason = check("reason", reason, str)
        self.by_reason[reason or "specgraph"] += 1
        if self.log_every and self.by_reason.total() % self.log_every == 0:
            self.log.info("proposes: %s", ", ".join(f"{name}: {n}" for name, n in self.by_reason.most_common()))
