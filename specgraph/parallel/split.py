"""The part that a rank holds of a model split over several: tensor parallel, expert parallel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from specgraph.errors import ConfigError
from specgraph.validation import Count, Range, checked, checked_fields


@dataclass(frozen=True, slots=True)
class Share:
    """A part of a tensor: ranges of one dimension, joined."""

    dim: int
    ranges: tuple[tuple[int, int], ...]
    """(begin, end) each."""


Place = Annotated[int, Range(0)]


def _check_place(what: str, rank: int, size: int) -> None:
    if rank >= size:
        raise ConfigError(f"{what}: rank {rank} of {size}; their ranks are 0 to {size - 1}")


@checked_fields
@dataclass(frozen=True, slots=True)
class ExpertParallel:
    """A rank's place among the ranks that hold the experts of each mixture: equally many each, and whole.

    Ranks whose rows differ (data parallel) gather each other's rows first: every rank runs its experts over all rows,
    and the results are added up over all ranks.
    """

    rank: Place
    size: Count
    group: str
    """The name of all ranks that hold experts."""
    data_rank: Place = 0
    data_size: Count = 1
    """Ranks that have rows of their own, and this one's place among them."""
    data_group: str = ""
    """Their name."""

    def __post_init__(self) -> None:
        _check_place("ExpertParallel", self.rank, self.size)
        _check_place("ExpertParallel, data parallel", self.data_rank, self.data_size)

    @checked
    def part(self, num_experts: int) -> tuple[int, int]:
        """(begin, end) of this rank's experts; `num_experts` is a multiple of `size`."""
        each = num_experts // self.size
        return self.rank * each, (self.rank + 1) * each


@checked_fields
@dataclass(frozen=True, slots=True)
class ContextParallel:
    """A rank's place among the ranks that each hold a part of every request's keys: position p is on rank p % size."""

    rank: Place
    size: Count
    group: str
    """The name of their process group; all of them hold the same KV heads."""
    gathers_heads: bool = False
    """Each rank has query heads of its own, and attends with those of all ranks."""

    def __post_init__(self) -> None:
        _check_place("ContextParallel", self.rank, self.size)


@checked_fields
@dataclass(frozen=True, slots=True)
class TensorParallel:
    """A rank's place among the ranks that split a model's matrices.

    Query, key, value, gate and up projections are split by rows (each rank computes some heads, and some of the MLP's
    inner columns); output and down projections by columns, and their partial results are added up over the ranks.
    Embedding and lm_head are split by rows, the vocabulary. The experts of a mixture are each split like the MLP, or
    dealt out whole where `experts` says so. Everything else is whole on every rank.
    """

    rank: Place = 0
    size: Count = 1
    group: str = ""
    """The name of the ranks' process group (`ranks_named`): a captured op takes plain values."""
    experts: ExpertParallel | None = None
    """The ranks that hold whole experts; not only those that split the other matrices where ranks are data parallel."""
    context: ContextParallel | None = None
    """The ranks that share the keys of every request with this one; None where each rank has them all."""

    def __post_init__(self) -> None:
        _check_place("TensorParallel", self.rank, self.size)

    @checked
    def part(self, total: int) -> tuple[int, int]:
        """Return (begin, end) of this rank's part of `total` equal things; `total` is a multiple of `size`."""
        each = total // self.size
        return self.rank * each, (self.rank + 1) * each

    @checked
    def share(self, dim: int, total: int) -> Share | None:
        """Return this rank's part of a dimension of size `total`; None for all of it."""
        return None if self.size == 1 else Share(dim, (self.part(total),))

    @checked
    def kv_heads(self, num_kv_heads: int) -> tuple[int, int]:
        """Return (begin, end) of this rank's KV heads; with fewer heads than ranks, neighbours hold the same one."""
        if num_kv_heads >= self.size:
            return self.part(num_kv_heads)
        head = self.rank * num_kv_heads // self.size
        return head, head + 1

    @checked
    def vocabulary(self, rows: int) -> Share | None:
        """Return this rank's rows of an embedding or lm_head; None where they cannot be split evenly: each has all."""
        return self.share(0, rows) if rows % self.size == 0 else None

    @checked
    def check(self, heads: tuple[Count, Count] | None, inner: int, what: str) -> None:
        """Raise ConfigError for a model, `what` in the message, that cannot be split over the ranks: by its query and
        KV heads (None where attention is whole on every rank), or the `inner` columns of its MLP.
        """
        num_heads, num_kv_heads = heads or (self.size, 1)
        even = num_kv_heads % self.size == 0 or self.size % num_kv_heads == 0
        each = self.size // num_kv_heads if self.size % num_kv_heads == 0 else 1
        if num_heads % self.size or inner % self.size or not even:
            counted = "" if heads is None else f"{num_heads} heads, {num_kv_heads} KV heads and "
            raise ConfigError(
                f"tensor parallel over {self.size} ranks: {what} has {counted}an MLP of {inner} columns, which they "
                "cannot split evenly; choose a number that divides them"
            )
        if self.context is not None and each % self.context.size:
            raise ConfigError(
                f"decode context parallel over {self.context.size} ranks: {what} has {num_kv_heads} KV heads, so "
                f"{each} of {self.size} tensor parallel ranks hold the same one; choose a divisor of {each}"
            )

    def check_experts(self, num_experts: int, inner: int) -> None:
        """Raise ConfigError for a mixture that cannot be split over the ranks."""
        if self.experts is not None and num_experts % self.experts.size:
            raise ConfigError(
                f"expert parallel over {self.experts.size} ranks: there are {num_experts} experts, which they cannot "
                "share out evenly; choose a number of ranks that divides them"
            )
        if self.experts is None and inner % self.size:
            raise ConfigError(
                f"tensor parallel over {self.size} ranks: each expert has {inner} columns, which they cannot split "
                "evenly; choose a number that divides them, or expert parallel"
            )


WHOLE = TensorParallel()
"""One rank that holds the whole model."""
