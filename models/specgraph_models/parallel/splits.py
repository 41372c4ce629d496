"""The part of a model that a rank holds: tensor parallel, expert parallel, context parallel."""

from __future__ import annotations

from dataclasses import dataclass

from specgraph.errors import ConfigError
from specgraph.parallel import ContextParallel, Place, check_place
from specgraph.validation import Count, checked, checked_fields
from specgraph_models.parallel.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Share:
    """A part of a tensor: ranges of one dimension, concatenated."""

    dim: int
    ranges: tuple[tuple[int, int], ...]
    """(begin, end) of each range."""


@checked_fields
@dataclass(frozen=True, slots=True)
class ExpertParallel:
    """A rank's place among the ranks that hold a mixture's experts. Each rank holds the same number of whole experts.

    Ranks with rows of their own (data parallel) first gather each other's rows. Every rank then runs its experts over
    all rows, and the results are added up over all ranks.
    """

    rank: Place
    size: Count
    group: str
    """The name of the process group of all ranks that hold experts."""
    data_rank: Place = 0
    """This rank's place among the ranks that have rows of their own."""
    data_size: Count = 1
    """The number of ranks that have rows of their own."""
    data_group: str = ""
    """The name of their process group."""

    def __post_init__(self) -> None:
        check_place("ExpertParallel", self.rank, self.size)
        check_place("ExpertParallel, data parallel", self.data_rank, self.data_size)

    @checked
    def part(self, num_experts: int) -> tuple[int, int]:
        """Return (begin, end) of this rank's experts; `num_experts` is a multiple of `size`."""
        each = num_experts // self.size
        return self.rank * each, (self.rank + 1) * each


@checked_fields
@dataclass(frozen=True, slots=True)
class TensorParallel:
    """A rank's place among the ranks that split a model's matrices.

    Query, key, value, gate and up projections are split by rows: each rank computes some heads, and some of the MLP's
    inner columns. Output and down projections are split by columns, and their partial results are added up over the
    ranks. Embedding and lm_head are split by rows, the vocabulary. Each expert of a mixture is split like the MLP, or
    is whole on one rank if `experts` is set. Everything else is whole on every rank.
    """

    rank: Place = 0
    size: Count = 1
    group: str = ""
    """The name of these ranks (`RankPlace.group`)."""
    experts: ExpertParallel | None = None
    """The ranks that hold whole experts. With data parallel ranks they are more than the ranks that split the other
    matrices. None if each expert is split."""
    context: ContextParallel | None = None
    """The ranks that share the keys of every request with this one. None if each rank has all keys."""

    def __post_init__(self) -> None:
        check_place("TensorParallel", self.rank, self.size)

    @property
    def has_collectives(self) -> bool:
        """Return whether the passes of such a model exchange with other ranks."""
        return self.size > 1 or self.context is not None or (self.experts is not None and self.experts.size > 1)

    @checked
    def part(self, total: int) -> tuple[int, int]:
        """Return (begin, end) of this rank's part of `total` equal items; `total` is a multiple of `size`."""
        each = total // self.size
        return self.rank * each, (self.rank + 1) * each

    @checked
    def share(self, dim: int, total: int) -> Share | None:
        """Return this rank's part of a dimension of size `total`. None if it is all of it."""
        return None if self.size == 1 else Share(dim, (self.part(total),))

    @checked
    def kv_heads(self, num_kv_heads: int) -> tuple[int, int]:
        """Return (begin, end) of this rank's KV heads. With fewer heads than ranks, neighbours hold the same head."""
        if num_kv_heads >= self.size:
            return self.part(num_kv_heads)
        head = self.rank * num_kv_heads // self.size
        return head, head + 1

    @checked
    def vocabulary(self, rows: int) -> Share | None:
        """Return this rank's rows of an embedding or lm_head. None if it has all, as it does without an even split."""
        return self.share(0, rows) if rows % self.size == 0 else None

    @checked
    def check(self, heads: tuple[Count, Count] | None, inner: int, what: str) -> None:
        """Raise ConfigError if a model can't be split evenly over the ranks.

        Args:
            heads: its numbers of query and KV heads. None if attention is whole on every rank.
            inner: the inner columns of its MLP.
            what: names the model in the message.
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
        """Raise ConfigError if a mixture of experts with `inner` columns each can't be split evenly over the ranks."""
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


@checked
def split_over(ranks: Ranks | None) -> TensorParallel:
    """Return this rank's share of a model that all of `ranks` split; WHOLE without ranks."""
    return WHOLE if ranks is None or ranks.size == 1 else TensorParallel(ranks.rank, ranks.size, ranks.name)
