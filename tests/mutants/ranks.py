"""Bugs of ranks, put in where their processes start (`rank_process.py`): in rank 1 alone, or in both."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mutants.registry import mutant
from specgraph_conformance import rank

from specgraph import ops
from specgraph.engine import EngineConfig, SpeculativeDecoder
from specgraph.engine.rounds import Rounds
from specgraph.models import experts, layers, llama

Bug = Callable[[pytest.MonkeyPatch], None]
BUGS: dict[str, tuple[Bug, tuple[str, ...]]] = {}
"""By name, with the ranks that have it."""


def of_ranks(name: str, *having: str, hazard: str = "") -> Callable[[Bug], Bug]:
    """Register a mutant that patches the processes of the ranks `having` it."""

    def register(bug: Bug) -> Bug:
        def start(patch: pytest.MonkeyPatch) -> None:
            paths = [str(Path(__file__).parents[1]), *sys.path]
            patch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))
            patch.setattr(rank, "COMMAND", (sys.executable, "-u", "-m", "mutants.rank_process", name))

        BUGS[name] = bug, having
        start.__doc__ = bug.__doc__
        mutant(name, "engine", hazard)(start)
        return bug

    return register


@of_ranks("collective-order-differs", "1")
def gathers_instead(patch: pytest.MonkeyPatch) -> None:
    """One rank adds up the experts' results of all ranks by a gather, where the others all-reduce."""
    real = experts.add_experts

    def gathered(partial: Any, ranks: Any) -> Any:
        parts = ops.all_gather(partial, ranks.experts.group, ranks.experts.size)
        partial.copy_(parts.view(ranks.experts.size, *partial.shape).sum(dim=0))
        return real(partial, ranks)

    patch.setattr(experts, "add_experts", gathered)


@of_ranks("rank-captures-other-size", "1")
def sizes(patch: pytest.MonkeyPatch) -> None:
    """One rank captures every size up to the largest, the others a ladder."""
    patch.setattr(EngineConfig, "sizes", property(lambda self: tuple(range(1, self.max_num_requests + 1))))


@of_ranks("rank-captures-other-size-dispatch", "1", hazard="rank-captures-other-size")
def pads_for_itself(patch: pytest.MonkeyPatch) -> None:
    """One rank pads its rounds for its own batch, not for the largest of all ranks."""
    _own_batch(patch)


@of_ranks("idle-rank-skips-round", "1")
def returns_early(patch: pytest.MonkeyPatch) -> None:
    """A rank without requests returns from `step` at once."""
    real = SpeculativeDecoder.step
    patch.setattr(SpeculativeDecoder, "step", lambda self: real(self) if self.num_unfinished else [])


@of_ranks("ranks-differ-in-k", "1")
def own_k(patch: pytest.MonkeyPatch) -> None:
    """One rank drafts as many tokens as its own batch asks for."""
    _own_batch(patch)


def _own_batch(patch: pytest.MonkeyPatch) -> None:
    real = Rounds._launch

    def launch(self: Any, num_rows: int) -> None:
        if num_rows:
            self._agreed = replace(self._agreed, num_requests=num_rows)
        real(self, num_rows)

    patch.setattr(Rounds, "_launch", launch)


@of_ranks("dummy-run-skips-collectives", "1")
def no_inert_prompts(patch: pytest.MonkeyPatch) -> None:
    """A rank without a prompt leaves out the passes over those of other ranks."""
    patch.setattr(Rounds, "_prefill_idle", lambda self: None)


@of_ranks("ranks-add-twice", "0", "1")
def residual_on_every_rank(patch: pytest.MonkeyPatch) -> None:
    """Every rank adds the residual to its partial sum."""

    def row_parallel(x: Any, weight: Any, residual: Any, ranks: Any) -> Any:
        out = ops.norm_linear(x, None, weight, residual)
        if ranks.size > 1:
            ops.all_reduce(out, ranks.group)
        return out

    patch.setattr(layers, "row_parallel", row_parallel)


@of_ranks("logits-gathered-by-rank", "0", "1")
def logits_by_rank(patch: pytest.MonkeyPatch) -> None:
    """Logits gathered rank by rank are read row by row."""

    def whole_logits(logits: Any, ranks: Any, vocab_size: int) -> Any:
        if ranks.size == 1:
            return logits
        return ops.all_gather(logits, ranks.group, ranks.size).view(-1, vocab_size)

    patch.setattr(llama, "whole_logits", whole_logits)
