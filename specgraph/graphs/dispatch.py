"""From a batch to the captured graph that serves it. A pure function: the same batch always gets the same graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specgraph.graphs.capture_sizes import padded_size
from specgraph.graphs.descriptor import BatchDescriptor, Phase


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The padded descriptor, whether a graph serves it, and why not if not."""

    descriptor: BatchDescriptor
    captured: bool
    reason: str = ""


def dispatch(
    phase: Phase, num_requests: int, query_len: int, num_speculative_tokens: int, sizes: Sequence[int]
) -> Dispatch:
    """Pad a uniform batch to the least captured size that holds it, or leave it as it is for eager.

    Args:
        phase: which graph.
        num_requests: real requests, at least 1.
        query_len: rows per request that enter the graph.
        num_speculative_tokens: K.
        sizes: captured request counts, ascending; empty when nothing is captured.
    """
    size = padded_size(num_requests, sizes)
    descriptor = BatchDescriptor(phase, size or num_requests, query_len, num_speculative_tokens)
    if size is not None:
        return Dispatch(descriptor, captured=True)
    reason = f"the largest captured size is {sizes[-1]} requests, the batch has {num_requests}" if sizes else "no sizes"
    return Dispatch(descriptor, captured=False, reason=reason)
