"""Sums over the ranks of an engine's modules, within draft graphs."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from specgraph import ops
from specgraph.parallel import TensorParallel


def summed(x: Tensor, ranks: TensorParallel) -> Tensor:
    """Return the sum of `x` over the ranks, by the op that draft graphs record; a contiguous `x` is overwritten."""
    out = x.contiguous()
    ops.all_reduce(out, ranks.group)
    return out


@contextmanager
def sums_in_graph(group: Any, ranks: TensorParallel) -> Generator[list[torch.Size]]:
    """Let an engine's modules add up over the ranks by the op that the draft graphs record, while the context lasts; it
    gives the shapes of what they have added up.

    An engine's own all-reduce is a kernel over buffers that its ranks tell each other when the engine's own captures
    end; within another capture it reads addresses that nobody has written, and in a warm-up it returns what nobody has
    computed.

    Args:
        group: the engine's group of ranks, whose `all_reduce` is another one within the context.
        ranks: the same ranks.
    """
    sums: list[torch.Size] = []

    def all_reduce(x: Tensor) -> Tensor:
        sums.append(x.shape)
        return summed(x, ranks)

    group.all_reduce = all_reduce
    try:
        yield sums
    finally:
        del group.all_reduce
