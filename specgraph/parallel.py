"""A rank's place among the ranks of a run, and the groups of ranks that captured collectives find by name.

A captured collective (`specgraph.ops.collectives`) takes plain values, so it has its group's name, and each replay
finds the group here. `specgraph_models.parallel` makes such groups; a host engine may register its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from specgraph.errors import ConfigError, RankError
from specgraph.validation import Count, Range, checked, checked_fields, shown

__all__ = ["ContextParallel", "RankGroup", "RankPlace", "ranks_named", "register_ranks", "unregister_ranks"]

Place = Annotated[int, Range(0)]
_dist: Any = torch.distributed
ALL_GATHER = "all_gather_single" if hasattr(_dist, "all_gather_single") else "all_gather_into_tensor"
"""The name of torch's all-gather into one tensor: the newer name if torch has it."""


class RankPlace(Protocol):
    """A rank's place among ranks that share something; `ContextParallel` and the splits of a model are such places."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def group(self) -> str: ...  # the name of the group of these ranks


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
    """The name of the group of these ranks. All of them hold the same KV heads."""
    gathers_heads: bool = False
    """True if each rank has query heads of its own. It then attends with the query heads of all ranks."""

    def __post_init__(self) -> None:
        check_place("ContextParallel", self.rank, self.size)


@runtime_checkable
class RankGroup(Protocol):
    """Ranks that run collectives together, as one of them sees them."""

    @property
    def name(self) -> str: ...

    def gather_small(self, what: str, x: Tensor) -> Tensor | None:
        """Compare `what` (collective, dtype, shape) over the hosts before the collective runs, if this group does that.
        Return every rank's x, [ranks, *x.shape], or None if `run` still has to run the collective."""
        ...

    def run(self, what: str, function: str, *tensors: Tensor) -> None:
        """Run torch.distributed's `function` on device tensors. Raises RankError, with `what` in it, if that fails."""
        ...


_GROUPS: dict[str, RankGroup] = {}
"""The registered groups by name."""


def register_ranks(group: RankGroup) -> None:
    """Let captured collectives find a group by its name. Raises ConfigError if another has the name."""
    given: Any = group
    if not isinstance(given, RankGroup) or not isinstance(cast(object, given.name), str):
        raise ConfigError(f"group must be a RankGroup (name, gather_small, run), got {shown(group)}")
    if _GROUPS.setdefault(group.name, group) is not group:
        raise ConfigError(f"ranks '{group.name}' are registered already: give each group of ranks a name of its own")


@checked
def unregister_ranks(name: str) -> None:
    """Forget the group of that name, if there is one. Graphs with its collectives must not be replayed afterwards."""
    _GROUPS.pop(name, None)


@checked
def ranks_named(name: str) -> RankGroup:
    """Return the registered group of that name. Raises RankError if there is none."""
    if name not in _GROUPS:
        raise RankError(f"no ranks '{name}' are registered in this process (or they were closed): join the ranks first")
    return _GROUPS[name]
