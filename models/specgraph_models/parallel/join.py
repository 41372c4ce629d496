"""Makes ranks of the processes of a run: processes that torchrun started, or the process groups of a host engine."""

from __future__ import annotations

import os
from datetime import timedelta
from itertools import count
from typing import Annotated, Any

import torch

from specgraph.errors import ConfigError, RankError, first_line
from specgraph.parallel import register_ranks
from specgraph.validation import Count, Positive, Range, checked, environment_number
from specgraph_models.parallel.ranks import OPEN, Ranks

_dist: Any = torch.distributed
_numbers = count()
Rank = Annotated[int, Range(-1)]


def world_size() -> int:
    """Return the number of processes of torch.distributed. If that has not started, return torchrun's number, or 1."""
    return _dist.get_world_size() if _dist.is_initialized() else environment_number("WORLD_SIZE", 1, least=1)


@checked
def join_ranks(
    device: torch.device, size: Count, *, timeout: Positive = 600.0, init_method: str = "env://", rank: Rank = -1
) -> Ranks:
    """Meet the other processes. Every process calls it, with the same arguments.

    A host engine that has called `torch.distributed.init_process_group` itself keeps its groups. New groups are made of
    all its processes.

    Args:
        device: the device of this process.
        size: the number of processes.
        timeout: seconds that a rank waits for another before it ends with an error.
        init_method, rank: as in `torch.distributed.init_process_group`; from torchrun's environment by default.

    Raises:
        ConfigError: another number of processes was started, `rank` is not below `size`, or torchrun's environment
            lacks a variable or has one that is no number.
        RankError: the processes did not all come within `timeout`.
    """
    limit = timedelta(seconds=timeout)
    started = world_size() if init_method == "env://" else size
    if started != size:
        how = f"torchrun --nproc-per-node {size} -m specgraph_run ..."
        raise ConfigError(f"{size} ranks need {size} processes, and {started} were started: use {how}")
    name, starts = f"ranks-{next(_numbers)}", not _dist.is_initialized()
    if starts:
        _check_meeting(size, init_method, rank)
    try:
        if starts:
            library = _dist.get_default_backend_for_device(device)
            given = {} if rank < 0 else {"rank": rank, "world_size": size}
            _dist.init_process_group(library, init_method=init_method, timeout=limit, **given)
        group: Any = _dist.new_group(timeout=limit)
        host: Any = group if device.type == "cpu" else _dist.new_group(timeout=limit, backend="gloo")
    except (RuntimeError, ValueError) as error:
        raise RankError(f"the {size} processes did not meet within {timeout:g} s: {first_line(error)}") from error
    return _joined(name, group, host, limit, device.type == "cpu", starts)


def _check_meeting(size: int, init_method: str, rank: int) -> None:
    """Raise ConfigError, before a rank waits for the others, if the environment or `rank` does not let them meet."""
    if init_method == "env://":
        needed = ["MASTER_ADDR", "MASTER_PORT", *(["RANK"] if rank < 0 else [])]
        if missing := [name for name in needed if not os.environ.get(name)]:
            raise ConfigError(
                f"join_ranks: the environment lacks {', '.join(missing)}, by which processes meet: start them with "
                "torchrun, or give init_method and rank"
            )
        environment_number("MASTER_PORT", 0)
        rank = rank if rank >= 0 else environment_number("RANK", 0)
    if rank >= size:
        raise ConfigError(f"join_ranks: rank {rank} of {size} processes; their ranks are 0 to {size - 1}")


def ranks_of_groups(device: Any, host: Any, *, timeout: float = 600.0) -> Ranks:
    """Return the ranks of process groups that a host engine has made. Captured collectives run in `device`.

    Each process of the groups calls it. Closing the ranks leaves the groups to the host engine.

    Args:
        device: torch's process group for the device's tensors.
        host: the process group for the hosts of the same processes. On the CPU it is the same group.
        timeout: seconds that a rank waits for another, in waits that the groups do not limit.

    Raises:
        RankError: another process of the groups did not come.
    """
    name, limit = f"ranks-{next(_numbers)}", timedelta(seconds=timeout)
    return _joined(name, device, host, limit, device is host, False)


def _joined(name: str, group: Any, host: Any, limit: timedelta, compares: bool, started: bool) -> Ranks:
    """Return the ranks of these groups, once they have met."""
    members = tuple(_dist.get_process_group_ranks(group))
    store: Any = _dist.distributed_c10d._get_default_store()  # torch has no public way to it
    store = _dist.PrefixStore(f"specgraph/{name}-{members[0]}", store)
    rank = members.index(_dist.get_rank())
    joined = Ranks(name, rank, len(members), group, host, store, limit, compares, started, members)
    joined.exchange("the first exchange")  # connects the hosts: they then notice at once if a rank ends
    OPEN[name] = joined
    register_ranks(joined)
    return joined
