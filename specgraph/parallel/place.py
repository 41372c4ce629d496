"""The place of a rank among the ranks that share something: a vocabulary, or the keys of every request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Protocol

from specgraph.errors import ConfigError
from specgraph.validation import Count, Range, checked_fields

Place = Annotated[int, Range(0)]


class RankPlace(Protocol):
    """A rank's place among ranks that share something; `ContextParallel` and the splits of a model are such places."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def group(self) -> str:
        """The name of the ranks' process group (`ranks_named`): a captured op takes plain values."""
        ...


def check_place(what: str, rank: int, size: int) -> None:
    """Raise ConfigError for a rank that is none of 0 to size - 1."""
    if rank >= size:
        raise ConfigError(f"{what}: rank {rank} of {size}; their ranks are 0 to {size - 1}")


@checked_fields
@dataclass(frozen=True, slots=True)
class ContextParallel:
    """A rank's place among ranks that each hold a part of every request's keys: position p is on rank p % size."""

    rank: Place
    size: Count
    group: str
    """The name of these ranks' process group. All of them hold the same KV heads."""
    gathers_heads: bool = False
    """True if each rank has query heads of its own. It then attends with the query heads of all ranks."""

    def __post_init__(self) -> None:
        check_place("ContextParallel", self.rank, self.size)
