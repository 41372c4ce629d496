"""Ranks that differ on purpose: what each of two ranks does, by the name of the bug."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel.tasks import FIXTURES, generate, make_decoder, task
from specgraph_models.parallel import Ranks, join_ranks
from specgraph_models.start_up import agreed

from specgraph import ops
from specgraph.device import Graph
from specgraph.errors import CaptureError, ConfigError, RankError, SpecgraphError, UnsupportedError

PAIR = {"target": str(FIXTURES / "target"), "draft": str(FIXTURES / "eagle3-llama")}


def options_differ(ranks: Ranks) -> None:
    ranks.same("the comparison of options", {"dtype": "float32", "num_speculative_tokens": 5 + ranks.rank})


def collective_order_differs(ranks: Ranks) -> None:
    x = torch.ones(4, 8)
    for gathers in (ranks.rank == 0, ranks.rank == 1):
        if gathers:
            ops.all_gather(x, ranks.name, 2)
        else:
            ops.all_reduce(x, ranks.name)


def collective_shape_differs(ranks: Ranks) -> None:
    """One is the largest that the exchange carries, the other one is reduced after it."""
    ops.all_reduce(torch.ones(4096 + ranks.rank), ranks.name)


def rank_captures_other_size(ranks: Ranks) -> None:
    generate(ranks, **PAIR, capture_sizes=((2,), (1, 2))[ranks.rank])


def ranks_differ_in_k(ranks: Ranks) -> None:
    generate(ranks, **PAIR, num_speculative_tokens=3 - ranks.rank)


def rank_skips_a_round(ranks: Ranks) -> None:
    generate(ranks, **PAIR, max_tokens=12 - 8 * ranks.rank)
    ranks.exchange("the end of the requests")


def rank_refuses_elsewhere(ranks: Ranks) -> None:
    """Each rank refuses, one before it comes to the block in which the other one does."""
    with agreed(ranks):
        if ranks.rank == 1:
            raise ConfigError("no cache")
        with agreed(ranks):
            raise UnsupportedError("no kernel")


def rank_fails_to_capture(ranks: Ranks) -> None:
    """The third graph of rank 1, after its warm-up; hosts of devices don't compare the collectives of the next one."""
    ranks.compares, made = False, count(1)

    def full(self: Graph) -> AbstractContextManager[None]:
        if next(made) == 3:
            raise CaptureError("no room for graph 3")
        return capture(self)

    capture = Graph.capture
    with pytest.MonkeyPatch.context() as patch:
        if ranks.rank == 1:
            patch.setattr(Graph, "capture", full)
        make_decoder(ranks, **PAIR, capture_sizes=(1, 2))


DIFFER: dict[str, Callable[[Ranks], None]] = {
    "options": options_differ,
    "order": collective_order_differs,
    "shape": collective_shape_differs,
    "size": rank_captures_other_size,
    "k": ranks_differ_in_k,
    "round": rank_skips_a_round,
    "depth": rank_refuses_elsewhere,
    "capture": rank_fails_to_capture,
}


@task
def disagree(ranks: Ranks) -> dict[str, Any]:
    """Each of DIFFER with ranks of its own: the error of this rank."""
    found: dict[str, Any] = {}
    for name, body in DIFFER.items():
        joined = join_ranks(torch.device("cpu"), ranks.size, timeout=120.0)
        try:
            body(joined)
            found[name] = None
        except SpecgraphError as error:
            found[name] = [str(error), isinstance(error, RankError) and error.everywhere]
        joined.close()
    return found


@task
def absent(ranks: Ranks, flag: str, seconds: float) -> str:
    """Rank 1 stays away until rank 0 has given up, which happens after `seconds`."""
    ranks = join_ranks(torch.device("cpu"), ranks.size, timeout=seconds)  # both processes are up by now
    if ranks.rank == 1:
        while not Path(flag).exists():
            time.sleep(0.05)
        return "stayed away"
    try:
        ops.all_reduce(torch.ones(3), ranks.name)
    except RankError as error:
        return str(error)
    finally:
        Path(flag).touch()
    return "no error"


@task
def killed(ranks: Ranks) -> str:
    """Rank 1 ends in the middle of a run, without a word."""
    if ranks.rank == 1:
        os._exit(3)
    try:
        ops.all_reduce(torch.ones(3), ranks.name)
    except RankError as error:
        return str(error)
    return "no error"


@task
def left(ranks: Ranks, flag: str) -> str:
    """Rank 1 refuses to start, leaves its group and lives on until rank 0 has noticed."""
    if ranks.rank == 1:
        ranks.close()
        while not Path(flag).exists():
            time.sleep(0.05)
        return "left"
    try:
        ranks.same("the comparison of what is captured", {})
    except RankError as error:
        return str(error)
    finally:
        Path(flag).touch()
    return "no error"
