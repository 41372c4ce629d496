"""Golden traces: rounds of a drafter as data, to replay against the drafter of any engine.

A trace is a folder with a small checkpoint (config.json, model.safetensors, in the layout of Hugging Face) and
trace.json: for each round the requests, what the target accepted and sampled, and the exact draft tokens of a greedy
drafter in float64. Requests join and leave, and the drafts of a round are rejected from any position on. The best token
leads the second best by at least `margin` at every draft, so that float32 and bfloat16 give the same tokens.

    trace = load_trace("draft-model")
    replay(trace, propose)          # propose(round) returns the draft tokens of each request, [n][K]
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "traces"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request in one round."""

    id: int
    """The same in all rounds of a request; a new id joins, one that is not in the next round has left."""
    token_ids: tuple[int, ...]
    """Prompt and output so far, with the tokens of this round: what a drafter without a cache needs."""
    num_prompt: int
    """The number of them that are the prompt."""
    num_sampled: int
    """The last `num_sampled` of them are new: accepted drafts of the round before, then the target's own token."""
    drafts: tuple[int, ...]
    """The expected draft tokens, K of them."""

    @property
    def joins(self) -> bool:
        """True in its first round."""
        return len(self.token_ids) == self.num_prompt + 1

    @property
    def start_position(self) -> int:
        """`ProposeBatch.start_positions`: the row at this position takes the first of the new tokens."""
        return len(self.token_ids) - self.num_sampled - 1


@dataclass(frozen=True, slots=True)
class TraceRound:
    """One propose for all running requests."""

    number: int
    requests: tuple[TraceRequest, ...]
    num_speculative_tokens: int


@dataclass(frozen=True, slots=True)
class Trace:
    """All rounds of one drafter."""

    name: str
    folder: Path
    """The checkpoint."""
    kind: str
    num_speculative_tokens: int
    margin: float
    """Smallest lead of a draft's logit over the second best."""
    rounds: tuple[TraceRound, ...]


class TraceMismatch(AssertionError):
    """Other draft tokens than those of the trace."""


Propose = Callable[[TraceRound], Sequence[Sequence[int]]]
"""The adapter: runs an engine's drafter for one round and returns the draft tokens of each request in order."""


def names() -> list[str]:
    """Return the names of the traces that are shipped."""
    return sorted(path.parent.name for path in FOLDER.glob("*/trace.json"))


def load_trace(name: str | Path) -> Trace:
    """Return a shipped trace by name, or the one in a folder."""
    folder = name if isinstance(name, Path) else FOLDER / name
    data = json.loads((folder / "trace.json").read_text(encoding="utf-8"))
    if data["format"] != FORMAT:
        raise ValueError(f"{folder} has format {data['format']}; this suite reads {FORMAT}")
    k, history, prompts = data["num_speculative_tokens"], dict[int, tuple[int, ...]](), dict[int, int]()
    rounds: list[TraceRound] = []
    for number, requests in enumerate(data["rounds"]):
        read: list[TraceRequest] = []
        for about in requests:
            id, sampled = about["id"], tuple(about["sampled_token_ids"])
            if "prompt" in about:
                history[id], prompts[id] = tuple(about["prompt"]), len(about["prompt"])
            history[id] += sampled
            drafts = tuple(about["draft_token_ids"])
            read.append(TraceRequest(id, history[id], prompts[id], len(sampled), drafts))
        rounds.append(TraceRound(number, tuple(read), k))
    return Trace(folder.name, folder, data["kind"], k, data["margin"], tuple(rounds))


def replay(trace: Trace, propose: Propose) -> int:
    """Run every round through `propose` and compare its draft tokens with the trace's.

    Returns:
        The number of draft tokens that were compared.

    Raises:
        TraceMismatch: the first request with other tokens, or another number of them.
    """
    compared = 0
    for round in trace.rounds:
        seen = propose(round)
        if len(seen) != len(round.requests):
            raise TraceMismatch(
                f"{trace.name}, round {round.number}: drafts for {len(seen)} requests, there are {len(round.requests)}"
            )
        for request, drafts in zip(round.requests, seen, strict=True):
            _compare(trace, round, request, [int(token) for token in drafts])
            compared += len(request.drafts)
    return compared


def _compare(trace: Trace, round: TraceRound, request: TraceRequest, drafts: list[int]) -> None:
    wanted = list(request.drafts)
    if drafts == wanted:
        return
    where = (
        f"{trace.name}, round {round.number}, request {request.id} ({len(request.token_ids)} tokens, "
        f"{'just joined' if request.joins else f'{request.num_sampled - 1} of {len(wanted)} drafts accepted before'})"
    )
    if len(drafts) != len(wanted):
        raise TraceMismatch(f"{where}: {len(drafts)} draft tokens, expected {len(wanted)}")
    first = next(i for i, (a, b) in enumerate(zip(drafts, wanted, strict=True)) if a != b)
    raise TraceMismatch(f"{where}: draft {first} is {drafts[first]}, expected {wanted[first]}; {drafts} for {wanted}")
