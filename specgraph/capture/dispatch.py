"""The captured graph that serves a batch: capture sizes, the key of a graph, and padding a batch to a captured size.

Everything here is a pure function of the configuration and the batch, so the same batch always gets the same graph.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from specgraph.errors import ConfigError

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


def capture_sizes(max_num_requests: int, asked: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return the numbers of requests to capture, ascending.

    Sizes of uniform batches count requests. Rows follow per phase as requests times rows per request, so step 0
    (K + 1 rows per request) and the later steps (1 row per request) share one list, and no size can be misaligned to
    K + 1. By default 1, 2, 4, then multiples of 8 up to 64, then multiples of 16, and always `max_num_requests`
    itself. Sizes that the user names are captured exactly as named, or refused.

    Raises:
        ConfigError: a named size is not in 1..max_num_requests, or is named twice.
    """
    if asked is None:
        ladder = [1, 2, 4, *range(8, 65, 8), *range(80, max_num_requests, 16)]
        return (*(size for size in ladder if size < max_num_requests), max_num_requests)
    return _checked("capture sizes", asked, max_num_requests, "max_num_requests")


def prefill_sizes(max_model_len: int, asked: Sequence[int] | None = None, longest: int = 512) -> tuple[int, ...]:
    """Return the rows of prefill passes to capture, ascending; the last one is also the longest chunk of a prompt.

    By default powers of two from 16 to `longest`, or to `max_model_len` if that is less.

    Raises:
        ConfigError: a named size is not in 1..max_model_len, or is named twice.
    """
    if asked is not None:
        return _checked("prefill sizes", asked, max_model_len, "max_model_len")
    longest = min(longest, max_model_len)
    return (*(size for size in (16, 32, 64, 128, 256) if size < longest), longest)


def _checked(what: str, asked: Sequence[int], limit: int, limit_name: str) -> tuple[int, ...]:
    if not asked:
        raise ConfigError(f"{what}: the list is empty; name at least one size, or use decode 'eager'")
    wrong = [size for size in asked if not 1 <= size <= limit]
    if wrong:
        raise ConfigError(f"{what} {wrong} are outside 1..{limit} ({limit_name})")
    if len(set(asked)) != len(asked):
        raise ConfigError(f"{what} {list(asked)} name a size twice")
    return tuple(sorted(asked))
