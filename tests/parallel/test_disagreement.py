"""Ranks that differ, stay away or end: every other rank ends too, with an error that says what and where."""

from __future__ import annotations

import os
import re
import socket
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from forks import forks
from parallel.processes import SECONDS, results, run_ranks
from specgraph_models.parallel import Ranks, join_ranks
from specgraph_models.start_up import PATIENCE, agreed
from specgraph_plugin import FastPath

from specgraph import ops
from specgraph.errors import RankError


@pytest.fixture(scope="module")
def errors() -> list[dict[str, Any]]:
    """The error of each way in which two ranks differ, by rank."""
    return results(2, "disagree")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("options", "rank 1 has num_speculative_tokens 6, rank 0 has 5"),
        ("order", r"rank 0 is at all_gather of float32 \[4, 8\].*, rank 1 at all_reduce of float32 \[4, 8\]"),
        ("shape", r"rank 0 is at all_reduce of float32 \[4096\].*, rank 1 at all_reduce of float32 \[4097\]"),
        ("size", r"rank 1 has capture sizes \[1, 2\], rank 0 has \[2\]"),
        ("k", r"rank 1 has rows per request of verifies \[3\], rank 0 has \[4\]"),
        ("round", r"rank 0 is at all_\w+ of \w+ \[.*, rank 1 at the end of the requests"),
        ("capture", "rank 1 failed: CaptureError: no room for graph 3"),
    ],
)
def test_ranks_that_differ_end_with_the_same_error(errors, how, said):
    for rank in errors:
        assert rank[how] is not None, "no error: a device would hang here"
    assert errors[0][how] == errors[1][how]
    message, everywhere = errors[0][how]
    assert everywhere
    assert re.search(said, message), message


def test_ranks_that_refuse_at_different_depths_each_say_why(errors):
    assert [rank["depth"][0] for rank in errors] == ["no kernel", "no cache"]


def test_a_rank_that_does_not_come_is_named(tmp_path):
    waited, stayed = results(2, "absent", flag=str(tmp_path / "done"), seconds=5.0)
    assert stayed == "stayed away"
    assert "rank 0 waited at all_reduce of float32 [3]: rank 1 did not come there" in waited


def test_a_rank_that_ends_takes_the_others_with_it():
    survivor, dead = run_ranks(2, "killed")
    assert dead == {"exit": 3}
    assert "rank 0 waited at all_reduce of float32 [3]: rank 1 did not come there" in survivor["result"]


def test_a_rank_that_leaves_is_not_waited_for(tmp_path):
    waited, left = results(2, "left", flag=str(tmp_path / "done"))
    assert left == "left"
    assert "rank 0 waited at the comparison of what is captured: rank 1 did not come there" in waited
    assert "Timed out" not in waited, "the connection is closed"


def wait_for_the_holder(rank: int, port: int, out: Path) -> None:
    """One of three ranks: rank 0, whose process holds the store, ends without a word, and the others wait for it."""
    ranks = join_ranks(torch.device("cpu"), 3, init_method=f"tcp://127.0.0.1:{port}", rank=rank, timeout=120.0)
    if rank == 0:
        os._exit(3)
    try:
        ops.all_reduce(torch.ones(3), ranks.name)
    except RankError as error:
        out.write_text(str(error))
    os._exit(0)


def test_the_first_rank_which_holds_the_store_is_named_where_it_ends(tmp_path):
    """A rank that is left asks the store, which is gone, and does not say that itself did not come."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    out = [tmp_path / str(rank) for rank in range(3)]
    started = [forks().Process(target=wait_for_the_holder, args=(rank, port, out[rank])) for rank in range(3)]
    for process in started:
        process.start()
    for process in started:
        process.join(SECONDS)
    for rank in (1, 2):
        said = out[rank].read_text()
        assert re.match(rf"rank {rank} waited at all_reduce of float32 \[3\]: rank 0 (has ended|did not come)", said), (
            said
        )


def test_a_rank_that_takes_the_store_with_it_is_named(monkeypatch):
    """It ends between the exchange and what the others read."""

    def closed(key):
        raise RuntimeError("Connection was likely closed.")

    store = SimpleNamespace(set=lambda key, text: None, get=closed)
    monkeypatch.setattr(Ranks, "exchange", lambda self, what: [[], []])
    ranks = Ranks("two", 1, 2, None, None, store, timedelta(seconds=1), True, False, (0, 1))
    with pytest.raises(RankError, match=r"rank 0 has ended .* at a comparison\. The .* likely closed"):
        ranks.same("a comparison", {})


def no_room(*_: Any) -> None:
    raise MemoryError("no room")


def capture(ranks: Ranks) -> None:
    with agreed(ranks, PATIENCE):
        no_room()


def warm_up(ranks: Ranks) -> None:
    FastPath.warm_up(cast(Any, SimpleNamespace(_ranks=ranks, fill=no_room)), cast(Any, None))


@pytest.mark.parametrize("fails", [capture, warm_up])
def test_a_rank_that_fails_ends_where_the_others_wait_for_it_on_the_device(fails, monkeypatch):
    """It does not go into an exchange to which they can't come."""

    def late(keys, timeout):
        raise RuntimeError("wait timeout after 60000ms")

    store = SimpleNamespace(set=lambda key, text: None, wait=late)
    monkeypatch.setattr(Ranks, "_gather", lambda *args: pytest.fail("waits in an exchange"))
    ranks = Ranks("two", 1, 2, None, None, store, timedelta(seconds=600), False, False, (0, 1))
    with pytest.raises(RankError, match="rank 1 failed: MemoryError: no room; it ends without"):
        fails(ranks)
