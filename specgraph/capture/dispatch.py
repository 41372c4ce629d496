"""The key of a captured graph, and the padding of a batch to a captured size.

All functions here are pure: they depend on configuration and batch only, so the same batch always gets the same graph.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

Phase = Literal["prefill", "verify", "propose", "first", "step"]
"""The part of the work that a graph covers.

- prefill: rows of one prompt, for target or drafter.
- verify: the target over K + 1 rows per request.
- propose: all draft steps of a drafter.
- first: draft step 0 alone.
- step: one later draft step alone, in most drafters with one row per request."""


@dataclass(frozen=True, slots=True, order=True)
class BatchDescriptor:
    """The key of a captured graph: all facts about a padded uniform batch that its graph depends on, and no others.

    Capture and replay look a graph up by the same descriptor, so they cannot disagree.
    """

    phase: Phase
    num_requests: int
    query_len: int
    """Rows per request in the graph."""
    num_speculative_tokens: int
    step: int = 0
    """The draft step if each one has a graph of its own. 0 if one graph serves all steps of the phase."""
    tree: bool = False
    """True if the drafts are trees of depth K, False if they are chains."""
    binding: int = 0
    """The number of the bound tensors (`Drafter.bind`) that a propose copies first. 0 if it copies none."""
    verified: int = 0
    """The drafts of all requests together that a ragged verify takes. 0 if the verify takes all of them."""

    @property
    def num_tokens(self) -> int:
        """Return the number of rows in the graph: num_requests * query_len, or fewer in a ragged verify. The product is
        not padded any further."""
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
    """The padded descriptor of a batch, whether a captured size holds the batch, and the reason if none does."""

    descriptor: BatchDescriptor
    captured: bool
    reason: str = ""


def dispatch(batch: BatchDescriptor, sizes: Sequence[int]) -> Dispatch:
    """Pad a batch to the least captured size that holds it. If there is none, the batch keeps its size and runs
    eagerly.

    sizes: the captured numbers of requests, ascending.
    """
    size = padded_size(batch.num_requests, sizes)
    if size is not None:
        return Dispatch(replace(batch, num_requests=size), captured=True)
    reason = f"the largest captured size is {sizes[-1]} requests, the batch has {batch.num_requests}"
    return Dispatch(batch, captured=False, reason=reason)


def padded_size(count: int, sizes: Sequence[int]) -> int | None:
    """Return the smallest of `sizes` (ascending) that is at least `count`. None if there is none."""
    index = bisect_left(sizes, count)
    return sizes[index] if index < len(sizes) else None
