"""The key of a captured graph: everything about a batch that its shape depends on, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Phase = Literal["prefill", "verify", "propose", "first", "step"]
"""prefill: rows of one prompt, for target or drafter. verify: the target over K + 1 rows a request. propose: a
drafter's whole loop. first: its step 0 over K + 1 rows. step: one later step, mostly one row a request."""


@dataclass(frozen=True, slots=True, order=True)
class BatchDescriptor:
    """A padded uniform batch. Dispatch makes it; capture and replay look a graph up by it, so they can't disagree."""

    phase: Phase
    num_requests: int
    query_len: int
    """Rows per request that enter the graph."""
    num_speculative_tokens: int
    step: int = 0
    """Which draft step, where a graph of its own serves each; 0 where there is one of the phase."""

    @property
    def num_tokens(self) -> int:
        """Rows that enter the graph: always num_requests * query_len, never rounded on its own."""
        return self.num_requests * self.query_len

    def __str__(self) -> str:
        step = f", step {self.step}" if self.step else ""
        return f"{self.phase}[{self.num_requests} x {self.query_len}, K={self.num_speculative_tokens}{step}]"
