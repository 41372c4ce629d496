"""The layout of a run's ranks: which split the matrices, which have requests of their own, which hold the experts."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from specgraph_models.parallel import ExpertParallel, Ranks, TensorParallel, join_ranks

from specgraph.errors import RankError
from specgraph.parallel import ContextParallel
from specgraph.validation import Count, Positive, checked
from specgraph_run.options import check_layout


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """The ranks of one run, as one of them sees it. Made by `join_layout`; close `ranks`.

    The number of a rank is data_rank * tensor_parallel.size + tensor_parallel.rank.
    """

    ranks: Ranks
    """All ranks of the run."""
    tensor_parallel: TensorParallel
    """The part of the model that this rank holds."""
    data_rank: int = 0
    """The number of this rank's group among the groups with requests of their own."""
    data_size: int = 1
    """The number of groups of ranks with requests of their own."""


@checked
def join_layout(
    device: torch.device,
    *,
    tensor_parallel: Count = 1,
    data_parallel: Count = 1,
    expert_parallel: bool = False,
    decode_context_parallel: Count = 1,
    timeout: Positive = 600.0,
    **meeting: Any,
) -> ParallelLayout:
    """Meet the other processes of a run of tensor_parallel * data_parallel ranks.

    Args:
        tensor_parallel: ranks that split the matrices and have the same requests.
        data_parallel: groups of such ranks, each with requests of its own. The groups share the experts.
        expert_parallel: True if each rank holds whole experts, and all ranks together hold all. Otherwise each expert
            is split like the other matrices.
        decode_context_parallel: tensor parallel ranks that each hold a part of every request's keys. It divides
            `tensor_parallel`.
        timeout, meeting: as in `join_ranks`.

    Raises:
        ConfigError: data parallel ranks share nothing, `decode_context_parallel` does not divide `tensor_parallel`, or
            another number of processes was started.
        RankError: the processes did not all come within `timeout`.
    """
    check_layout(tensor_parallel, data_parallel, expert_parallel, decode_context_parallel)
    ranks = join_ranks(device, tensor_parallel * data_parallel, timeout=timeout, **meeting)
    data_rank, place = divmod(ranks.rank, tensor_parallel)
    tensors, data = ranks, ranks
    if data_parallel > 1 and tensor_parallel > 1:
        every = range(data_parallel * tensor_parallel)
        tensors = ranks.part("tensor", [every[i : i + tensor_parallel] for i in every[::tensor_parallel]])
        data = ranks.part("data", [every[i::tensor_parallel] for i in range(tensor_parallel)])
    experts = None
    if expert_parallel:
        experts = ExpertParallel(ranks.rank, ranks.size, ranks.name, data_rank, data_parallel, data.name)
    context = None
    if decode_context_parallel > 1:
        context = context_parallel(ranks, decode_context_parallel)
    return ParallelLayout(
        ranks,
        TensorParallel(place, tensor_parallel, tensors.name if tensor_parallel > 1 else "", experts, context),
        data_rank,
        data_parallel,
    )


def context_parallel(ranks: Ranks, size: int) -> ContextParallel:
    """Return this rank's place among `size` neighbours that share the keys of every request. All ranks call it."""
    groups = [range(first, first + size) for first in range(0, ranks.size, size)]
    part = ranks.part("context", groups)
    return ContextParallel(part.rank, size, part.name)


@contextmanager
def leave_on_error(layout: ParallelLayout | None) -> Generator[None]:
    """Close the ranks if the block fails, so that the other ranks notice at once. An error that every rank raises
    closes nothing: another rank may still read the values that it compares."""
    try:
        yield
    except BaseException as error:
        if layout is not None and not (isinstance(error, RankError) and error.everywhere):
            layout.ranks.close()
        raise
