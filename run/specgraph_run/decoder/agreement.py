"""Agreement of ranks that share collectives: on the graphs to capture, and on the passes of each round, before it.

A rank that captures or dispatches another size than its peers, or leaves a pass out, makes all of them wait for ever
inside a collective (vLLM #37588). Agreement is one small exchange between the hosts; the device takes no part.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass

from specgraph.capture import ModelRunner
from specgraph.config import DraftConfig
from specgraph.errors import RankError, UnsupportedError
from specgraph.parallel import Ranks
from specgraph_run.options import RoundTimes


@dataclass(frozen=True, slots=True)
class RoundPasses:
    """The passes of one round: those that a rank's own requests need, or those that all ranks run.

    Each rank pads to what all ranks run. Where its own requests need less, the rest of a pass is inert requests, and a
    pass that it does not need has nothing else.
    """

    query_len: int = 0
    """Rows per request in the round before: one more than were drafted in it."""
    num_requests: int = 0
    """Requests in propose and verify."""
    prefills: int = 0
    """Prefill passes of the target, each with one of the drafter."""
    prefill_rows: int = 0
    """Rows of the longest of them."""
    unfinished: int = 0
    """Requests that wait or run; of all ranks together 0 only when there is nothing left to do on any of them."""


def agree(ranks: Ranks, own: RoundPasses) -> RoundPasses:
    """Return the passes of the next round on every rank, from what each one needs. All ranks call it before each round.

    RankError where ranks drafted different numbers of tokens, or one is at another exchange or late.
    """
    every = [RoundPasses(*values) for values in ranks.exchange("the agreement on a round", astuple(own))]
    for rank, passes in enumerate(every):
        if passes.query_len != every[0].query_len:
            raise RankError(
                f"rank {rank} has verified {passes.query_len - 1} draft tokens per request, rank 0 "
                f"{every[0].query_len - 1}: all ranks must draft the same number in the same round",
                everywhere=True,
            )
    return RoundPasses(*(max(values) for values in zip(*map(astuple, every), strict=True)))


def check_sharing(config: DraftConfig) -> None:
    """Raise UnsupportedError where data parallel ranks, which agree on each round, would choose a K of their own."""
    if config.k_candidates is not None:
        raise UnsupportedError(
            "K by acceptance with data parallel ranks: each follows its own requests, and all must draft the same "
            "number of tokens; give K as a number"
        )


def same_times(ranks: Ranks, times: RoundTimes) -> RoundTimes:
    """Return the first rank's times, on all: each rank measured its own, and by them all must choose the same K."""
    first: dict[str, dict[str, float]] = json.loads(ranks.tell("the times of rounds", json.dumps(times))[0])
    return {int(size): {int(k): time for k, time in by_k.items()} for size, by_k in first.items()}


def compare_captures(ranks: Ranks, runners: Mapping[str, ModelRunner], config: DraftConfig) -> None:
    """Raise RankError for the first graph, or number, that differs between two ranks, before the first warm-up, whose
    collectives would wait for ever.
    """
    asked: dict[str, object] = {
        "capture sizes": list(config.sizes),
        "prefill sizes": list(config.prefill_rows),
        "rows per request of verifies": list(config.query_lens),
    }
    for name, runner in runners.items():
        asked[f"lowering of the {name}"] = f"{runner.resolution.lowering}, prefill {runner.resolution.prefill}"
        asked[f"graphs of the {name}"] = [str(launch.descriptor) for _, _, launch in runner.captures()]
    ranks.same("the comparison of what is captured", asked)
