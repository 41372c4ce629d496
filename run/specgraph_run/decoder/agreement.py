"""Agreement of ranks that share collectives: on the graphs to capture, and on the passes of each round.

If a rank captures or dispatches another size than its peers, or leaves a pass out, all of them wait for ever inside a
collective (vLLM #37588). An agreement is one small exchange between the hosts; the device takes no part.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass

from specgraph_models.parallel import Ranks

from specgraph.capture import ModelRunner
from specgraph.config import DraftConfig
from specgraph.errors import RankError, UnsupportedError
from specgraph_run.options import RoundTimes


@dataclass(frozen=True, slots=True)
class RoundPasses:
    """The numbers and sizes of a round's passes: for the requests of one rank, or as agreed by all ranks.

    Each rank pads its passes to the agreed sizes. Inert requests fill the rows that its own requests leave free; a pass
    that it does not need has inert requests alone.
    """

    query_len: int = 0
    """Rows per request in the last round's results: one more than its drafts."""
    num_requests: int = 0
    """Requests in the propose and the verify."""
    prefills: int = 0
    """Prefill passes of the target. With a drafter, each is followed by one of the drafter."""
    prefill_rows: int = 0
    """Rows of the longest prefill pass."""
    unfinished: int = 0
    """Requests that wait or run. The agreed number is 0 only if no rank has anything left to do."""


def agree(ranks: Ranks, own: RoundPasses) -> RoundPasses:
    """Return the passes of the next round, the same on every rank. All ranks call it before each round.

    Args:
        own: the passes that this rank's requests need.

    Raises:
        RankError: ranks drafted different numbers of tokens, or a rank is late or takes part in another exchange.
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
    """Raise UnsupportedError if each data parallel rank would choose a K of its own: ranks agree on every round."""
    if config.k_candidates is not None:
        raise UnsupportedError(
            "K by acceptance with data parallel ranks: each follows its own requests, and all must draft the same "
            "number of tokens; give K as a number"
        )


def same_times(ranks: Ranks, times: RoundTimes) -> RoundTimes:
    """Return the first rank's times on all ranks. Each rank measured its own, but all must choose the same K."""
    first: dict[str, dict[str, float]] = json.loads(ranks.tell("the times of rounds", json.dumps(times))[0])
    return {int(size): {int(k): time for k, time in by_k.items()} for size, by_k in first.items()}


def compare_captures(ranks: Ranks, runners: Mapping[str, ModelRunner], config: DraftConfig) -> None:
    """Raise RankError if a graph or a size of a capture differs between two ranks; the text names the first.

    It is called before the first warm-up: unequal collectives would wait for ever there.
    """
    asked: dict[str, object] = {
        "capture sizes": list(config.sizes),
        "prefill sizes": list(config.prefill_rows),
        "rows per request of verifies": list(config.query_lens),
    }
    for name, runner in runners.items():
        asked[f"lowering of the {name}"] = f"{runner.resolution.lowering}, prefill {runner.resolution.prefill}"
        asked[f"graphs of the {name}"] = [str(launch.descriptor) for _, _, launch in runner.to_capture()]
    ranks.same("the comparison of what is captured", asked)
