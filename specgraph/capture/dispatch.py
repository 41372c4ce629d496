"""The captured graph that serves a batch: the key of a graph, and padding a batch to a captured size.

Everything here is a pure function of the configuration and the batch, so the same batch always gets the same graph.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

Phase = Literal["prefill", "verify", "propose", "first", "step"]
"""prefill: rows of one prompt, for target or drafter. verify: the target over K + 1 rows per request. propose: a
drafter's whole loop. first: its step 0 alone. step: one later step alone, in most drafters one row per request."""


@dataclass(frozen=True, slots=True, order=True)
class BatchDescriptor:
    """The key of a captured graph: everything about a padded uniform batch that shapes depend on, and nothing else.

    Capture and replay look a graph up by the same descriptor, made by `dispatch`, so they cannot disagree.
    """

    phase: Phase
    num_requests: int
    query_len: int
    """Rows per request that enter the graph."""
    num_speculative_tokens: int
    step: int = 0
    """The draft step, where each step has a graph of its own; 0 where one graph serves all steps of the phase."""
    tree: bool = False
    """The drafts are a tree and K is its depth; else a chain."""
    binding: int = 0
    """Number of the bound tensors (`Drafter.bind`) that a propose copies first; 0: it copies none."""
    verified: int = 0
    """Drafts of all requests together that a ragged verify takes; 0: all of them."""

    @property
    def num_tokens(self) -> int:
        """Return the rows that enter the graph: num_requests * query_len, never rounded on their own; fewer in a ragged
        verify."""
        if self.verified:
            return self.num_requests + self.verified
        return self.num_requests * self.query_len

    def __str__(self) -> str:
        step = f", step {self.step}" if self.step else ""
        tree = ", tree" if self.tree else ""
        bound = f", bound {self.binding}" if self.binding else ""
        verified = f", {self.verified} drafts verified" if self.verified else ""
        k = self.num_speculative_tokens
        return f"{self.phase}[{self.num_requests} x {self.query_len}, K={k}{tree}{step}{bound}{verified}]"


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The padded descriptor of a batch, whether a captured size holds it, and the reason if none does."""

    descriptor: BatchDescriptor
    captured: bool
    reason: str = ""


def dispatch(batch: BatchDescriptor, sizes: Sequence[int]) -> Dispatch:
    """Pad a batch to the least captured size that holds it, or leave it at its own size for eager.

    `sizes` are the captured numbers of requests, ascending.
    """
    size = padded_size(batch.num_requests, sizes)
    if size is not None:
        return Dispatch(replace(batch, num_requests=size), captured=True)
    reason = f"the largest captured size is {sizes[-1]} requests, the batch has {batch.num_requests}"
    return Dispatch(batch, captured=False, reason=reason)


def padded_size(count: int, sizes: Sequence[int]) -> int | None:
    """Return the smallest of `sizes` (ascending) that is at least `count`; None when there is none."""
    index = bisect_left(sizes, count)
    return sizes[index] if index < len(sizes) else None
