"""Bugs of ranks, put in where their processes start: in rank 1 alone, or in both."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mutants.registry import mutant, replace_function
from specgraph_conformance import rank

from specgraph import ops
from specgraph.config import DraftConfig

Broken = Callable[..., Any]
KEPT: list[torch.Tensor] = []
FIRST: dict[int, Any] = {}
BUGS: dict[str, tuple[str, Broken, tuple[str, ...]]] = {}
"""The places of the function, the one that replaces it, and the ranks that have the bug, by name."""


def of_ranks(name: str, places: str, *having: str) -> Callable[[Broken], Broken]:
    """Register a mutant that replaces a function at each of its places in the processes of the ranks `having` it."""

    def register(broken: Broken) -> Broken:
        def start(patch: pytest.MonkeyPatch) -> None:
            patch.setattr(rank, "COMMAND", (name,))
            patch.setattr(rank, "subprocess", SimpleNamespace(Popen=ForkedRank, PIPE=subprocess.PIPE))

        BUGS[name] = places, broken, having
        start.__doc__ = broken.__doc__
        mutant(name)(start)
        return broken

    return register


class ForkedRank:
    """One rank of the suite's cases between ranks, with a bug if this rank has it.

    A fork of the mutant's process, which has everything loaded, in place of the process that `rank.run_ranks` starts.
    """

    def __init__(self, command: list[str], **_: Any) -> None:
        reader, writer = os.pipe()
        self.stderr = open(reader, errors="replace")  # noqa: SIM115  (the suite reads it when the rank has ended)
        self.process = get_context("fork").Process(target=self.run, args=(writer, *command))
        self.process.start()
        os.close(writer)

    @staticmethod
    def run(stderr: int, bug: str, platform: str, number: str, *rest: str) -> None:
        sys.stderr = open(stderr, "w")  # noqa: SIM115
        places, broken, having = BUGS[bug]
        for place in places.split() if number in having else ():
            replace_function(pytest.MonkeyPatch(), place, broken)
        rank.main(platform, number, *rest)

    def poll(self) -> int | None:
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()

    def communicate(self) -> None:
        self.process.join()
        self.stderr.close()


@of_ranks("collective-order-differs", "specgraph_models.experts:add_experts", "1")
def gathers_instead(real: Any, partial: Any, ranks: Any) -> Any:
    """One rank adds up the experts' results of all ranks by a gather, where the others all-reduce."""
    parts = ops.all_gather(partial, ranks.experts.group, ranks.experts.size)
    partial.copy_(parts.view(ranks.experts.size, *partial.shape).sum(dim=0))
    return real(partial, ranks)


@of_ranks("rank-captures-other-size", "specgraph.config:DraftConfig.sizes", "1")
def sizes(real: Any, self: DraftConfig) -> tuple[int, ...]:
    """One rank captures every size up to the largest, the others a ladder."""
    return tuple(range(1, self.max_num_requests + 1))


@of_ranks("rank-captures-other-size-dispatch", "specgraph_run.decoder.rounds:Rounds._launch", "1")
def pads_for_itself(real: Any, self: Any, num_rows: int) -> None:
    """One rank pads its rounds for its own batch, not for the largest of all ranks."""
    _launch_own_batch(real, self, num_rows)


@of_ranks("idle-rank-skips-round", "specgraph_run.decoder:SpeculativeDecoder._step", "1")
def returns_early(real: Any, self: Any) -> Any:
    """A rank without requests returns from `step` at once."""
    return real(self) if self.num_unfinished else []


@of_ranks("ranks-differ-in-k", "specgraph_run.decoder.rounds:Rounds._launch", "1")
def own_k(real: Any, self: Any, num_rows: int) -> None:
    """One rank drafts as many tokens as its own batch asks for."""
    _launch_own_batch(real, self, num_rows)


def _launch_own_batch(real: Any, rounds: Any, num_rows: int) -> None:
    if num_rows:
        rounds._agreed = replace(rounds._agreed, num_requests=num_rows)
    real(rounds, num_rows)


@of_ranks("dummy-run-skips-collectives", "specgraph_run.decoder.rounds:Rounds._prefill_idle", "1")
def no_inert_prompts(real: Any, self: Any) -> None:
    """A rank without a prompt leaves out the passes over those of other ranks."""


@of_ranks("ranks-add-twice", "specgraph_models.layers:row_parallel", "0", "1")
def residual_on_every_rank(real: Any, x: Any, weight: Any, residual: Any, ranks: Any) -> Any:
    """Every rank adds the residual to its partial sum."""
    out = ops.norm_linear(x, None, weight, residual)
    if ranks.size > 1:
        ops.all_reduce(out, ranks.group)
    return out


@of_ranks("ranks-draft-other-tokens", "specgraph.ops:draft_from_logits", "1")
def noise_of_the_rank(real: Any, logits: Any, drafts: Any, draws: Any = None) -> Any:
    """One rank draws its drafts with noise of its own."""
    return real(logits, drafts, draws and draws._replace(seeds=draws.seeds + 1))


@of_ranks("logits-gathered-by-rank", "models.decoder:whole_rows draft.head_checks:whole_rows", "0", "1")
def logits_by_rank(real: Any, logits: Any, ranks: Any, vocab_size: int) -> Any:
    """Logits gathered rank by rank are read row by row."""
    if ranks.size == 1:
        return logits
    return ops.all_gather(logits, ranks.group, ranks.size).view(-1, vocab_size)


@of_ranks("heads-gathered-in-other-order", "specgraph.attention.paged:all_heads", "0", "1")
def heads_by_rank(real: Any, query: Any, ranks: Any) -> Any:
    """Query heads gathered rank by rank are read row by row."""
    gathered = ops.all_gather(query, ranks.group, ranks.size)
    return gathered.view(query.shape[0], -1, query.shape[2])


@of_ranks("lse-of-last-replay", "specgraph.attention.paged:own_heads", "0", "1")
def parts_of_before(real: Any, part: Any, num_heads: int, ranks: Any, dtype: Any) -> Any:
    """The log-sum-exp of a part is that of the replay before."""
    KEPT.append(torch.empty_like(part[..., -1]))
    stale = torch.cat((part[..., :-1], KEPT[-1][..., None]), dim=-1)
    KEPT[-1].copy_(part[..., -1])
    return real(stale, num_heads, ranks, dtype)


@of_ranks("lengths-of-another-rank", "specgraph.attention.paged:lengths_by_row", "1")
def lengths_of_rank_0(real: Any, lengths: Any, causal: bool, ranks: Any = None) -> Any:
    """Rank 1 updates with the lengths of rank 0."""
    return real(lengths, causal, ranks and replace(ranks, rank=0))


@of_ranks("rank-skips-update", "specgraph.attention.paged:lengths_by_row", "1")
def first_lengths(real: Any, lengths: Any, causal: bool, ranks: Any = None) -> Any:
    """Rank 1 leaves the lengths of its first replay with requests in its graphs."""
    now = real(lengths, causal, ranks)
    return FIRST.setdefault(len(now.seq_lens), now) if any(now.seq_lens) else now


@of_ranks("rank-without-keys", "specgraph.ops:sum_parts", "0", "1")
def no_keys_count_as_one(real: Any, parts: Any, *rest: Any) -> Any:
    """The log-sum-exp of no keys is taken as 0."""
    return real(parts.masked_fill(parts == float("-inf"), 0.0), *rest)


@of_ranks("tree-rows-moved-within-a-rank", "specgraph_run.decoder.move_rows:move_between", "0", "1")
def own_rows_alone(real: Any, caches: Any, slots: Any, to_slots: Any, ranks: Any) -> None:
    """Rows of a tree move only where both places are on the same rank."""
    stays = slots % ranks.size == to_slots % ranks.size
    real(caches, torch.where(stays, slots, 0), torch.where(stays, to_slots, 0), ranks)
