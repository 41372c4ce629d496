"""Ranks that differ: each bug is put into rank 1 of two, where its processes start (`rank_process.py`)."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mutants.registry import mutant
from specgraph_conformance import rank

from specgraph import kernels
from specgraph.decoding import EngineConfig, SpeculativeDecoder
from specgraph.decoding.rounds import Rounds
from specgraph.decoding.target import TargetRunner
from specgraph.drafting import Drafter
from specgraph.models import experts

Bug = Callable[[pytest.MonkeyPatch], None]
BUGS: dict[str, Bug] = {}


def of_rank_1(name: str, hazard: str = "") -> Callable[[Bug], Bug]:
    """Register a mutant that patches the process of rank 1 alone."""

    def register(bug: Bug) -> Bug:
        def start(patch: pytest.MonkeyPatch) -> None:
            paths = [str(Path(__file__).parents[1]), *sys.path]
            patch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))
            patch.setattr(rank, "COMMAND", (sys.executable, "-u", "-m", "mutants.rank_process", name))

        BUGS[name] = bug
        start.__doc__ = bug.__doc__
        mutant(name, "engine", hazard)(start)
        return bug

    return register


@of_rank_1("collective-order-differs")
def gathers_instead(patch: pytest.MonkeyPatch) -> None:
    """One rank adds up the experts' results of all ranks by a gather, where the others all-reduce."""
    real = experts.add_experts

    def gathered(partial: Any, ranks: Any) -> Any:
        parts = kernels.all_gather(partial, ranks.experts.group, ranks.experts.size)
        partial.copy_(parts.view(ranks.experts.size, *partial.shape).sum(dim=0))
        return real(partial, ranks)

    patch.setattr(experts, "add_experts", gathered)


@of_rank_1("rank-captures-other-size")
def sizes(patch: pytest.MonkeyPatch) -> None:
    """One rank captures every size up to the largest, the others a ladder."""
    patch.setattr(EngineConfig, "sizes", property(lambda self: tuple(range(1, self.max_num_requests + 1))))


@of_rank_1("rank-captures-other-size-dispatch", hazard="rank-captures-other-size")
def pads_for_itself(patch: pytest.MonkeyPatch) -> None:
    """One rank pads its verify for its own batch, not for the largest of all ranks."""
    real = TargetRunner.verify

    def verify(
        self: Any, num_requests: int, starts: Any, query_len: int, program: Any = None, at_least: int = 0
    ) -> None:
        real(self, num_requests, starts, query_len, program, 0 if num_requests else at_least)

    patch.setattr(TargetRunner, "verify", verify)


@of_rank_1("idle-rank-skips-round")
def returns_early(patch: pytest.MonkeyPatch) -> None:
    """A rank without requests returns from `step` at once."""
    real = SpeculativeDecoder.step
    patch.setattr(SpeculativeDecoder, "step", lambda self: real(self) if self.num_unfinished else [])


@of_rank_1("ranks-differ-in-k")
def own_k(patch: pytest.MonkeyPatch) -> None:
    """One rank drafts as many tokens as its own batch asks for."""
    real = Drafter.inputs
    patch.setattr(Drafter, "inputs", lambda self, n, query_len=None, at_least=0: real(self, n, query_len))


@of_rank_1("dummy-run-skips-collectives")
def no_inert_prompts(patch: pytest.MonkeyPatch) -> None:
    """A rank without a prompt leaves out the passes over those of other ranks."""
    patch.setattr(Rounds, "_prefill_idle", lambda self: None)
