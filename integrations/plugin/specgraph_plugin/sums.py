"""Sums the outputs of a host engine's modules over its ranks, within draft graphs."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from specgraph_models.parallel import TensorParallel
from torch import Tensor

from specgraph import ops


def summed(x: Tensor, ranks: TensorParallel) -> Tensor:
    """Return the sum of `x` over the ranks, by the op that draft graphs record. A contiguous `x` is overwritten."""
    out = x.contiguous()
    ops.all_reduce(out, ranks.group)
    return out


@contextmanager
def sums_in_graph(group: Any, ranks: TensorParallel) -> Generator[list[torch.Size]]:
    """Replace a host engine's all-reduce by the op that draft graphs record, within the context.

    The engine's own all-reduce reads buffers of other ranks, and the ranks exchange their addresses when the engine's
    own captures end. In another capture it would read addresses that are not written yet; in a warm-up it would return
    values that no rank has computed.

    Yields a list to which each sum adds its shape.

    Args:
        group: the engine's group of ranks. Its `all_reduce` is replaced.
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
