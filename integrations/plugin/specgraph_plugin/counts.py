"""Counts of the proposes of an engine that still drafts some batches by itself."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Annotated

from specgraph.validation import Range, check, checked_fields


@checked_fields
@dataclass(slots=True)
class ProposeCounts:
    """Counts of who drafted, for an engine whose own code drafts where specgraph does not; logged now and then."""

    log: logging.Logger
    log_every: Annotated[int, Range(0)] = 10_000
    """Proposes between two lines in the log; 0: none."""
    by_reason: Counter[str] = field(default_factory=Counter[str])
    """Proposes of specgraph under "specgraph", those of the engine under the reason why."""

    def add(self, reason: str | None) -> None:
        """Count one propose: `reason` is why the engine drafted, None where specgraph did."""
        if reason is not None and type(reason) is not str:
            reason = check("reason", reason, str)
        self.by_reason[reason or "specgraph"] += 1
        if self.log_every and self.by_reason.total() % self.log_every == 0:
            self.log.info("proposes: %s", ", ".join(f"{name}: {n}" for name, n in self.by_reason.most_common()))
