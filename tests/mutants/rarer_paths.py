"""Bugs on paths that few models, batches or devices take: passed by suite 1.4."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

from typing import Any

import pytest
from mutants.registry import mutant
from specgraph_run.decoder import joining, verify
from specgraph_run.decoder.verify import VerifyProgram

from specgraph import ops
from specgraph.cpu.tasks import UpdateMode
from specgraph.draft.chain import ChainProgram
from specgraph.draft.propose_passes import ProposePasses
from specgraph.draft.protocol import DraftOutput


@mutant("group-partly-rewritten-table", "specgraph.cpu.tasks:UpdateMode.commit")
def only_sixteen(real: Any, self: UpdateMode) -> None:
    """A task update rewrites the first sixteen ops of a group; those behind them keep old values."""
    for place, task in list(enumerate(self._group.tasks))[16 : len(self._new)]:
        self._new[place] = task.args, task.kwargs
    real(self)


@mutant("update-of-lengths-only", "specgraph.cpu.tasks:UpdateMode.commit")
def keyword_arguments_stay(real: Any, self: UpdateMode) -> None:
    """A task update rewrites positional arguments only: keyword arguments stay as captured."""
    self._new = [(args, task.kwargs) for (args, _), task in zip(self._new, self._group.tasks, strict=False)]
    real(self)


@mutant("carry-before-the-norm", "specgraph.draft.chain:ChainProgram._next_step")
def joined_steps_carry_hidden(real: Any, self: ChainProgram, b: Any, pair: Any, out: DraftOutput) -> Any:
    """The next step takes the hidden states before the output norm where one op joins two draft steps."""
    return real(self, b, pair, DraftOutput(out.hidden, out.hidden))


@mutant("stale-padding-in-place-once", "specgraph.draft.propose_passes:ProposePasses.hand_over")
def inert_the_first_time(real: Any, self: ProposePasses, batch: Any, *args: Any, seen: set[int] = set()) -> Any:  # noqa: B006 (kept)
    """The requests behind a batch in place are made inert for the first such batch only."""
    counts, in_place = self._memory.num_sampled, id(batch) in self._in_place
    before, ready = counts.clone(), real(self, batch, *args)
    if in_place and id(self) in seen:
        counts.copy_(before)
    seen.update([id(self)] if in_place else [])
    return ready


@mutant("noise-of-the-chunk")
def place_in_the_chunk(patch: pytest.MonkeyPatch) -> None:
    """The noise of the first token is that of its position within the prompt's last chunk."""
    passes, first, starts = joining.prefill_prompt, joining.first_token, [0]

    def prefill_prompt(*args: Any) -> range:
        found = passes(*args)
        starts[0] = found[-1]
        return found

    def first_token(logits: Any, temperature: Any, seed: Any, position: Any) -> Any:
        return first(logits, temperature, seed, position - starts[0])

    patch.setattr(joining, "prefill_prompt", prefill_prompt)
    patch.setattr(joining, "first_token", first_token)


@mutant("path-hidden-not-taken")
def hidden_of_the_last_token(patch: pytest.MonkeyPatch) -> None:
    """After the verify of a tree, the drafter is given the hidden state of the tree's root for all rows of the path."""
    real = VerifyProgram.work_of

    class RootRows:
        nodes = 1

        def __getattr__(self, name: str) -> Any:
            return getattr(ops, name)

        def take_rows(self, x: Any, rows: Any, out: Any) -> None:
            ops.take_rows(x, rows // self.nodes * self.nodes, out)

    changed = RootRows()

    def work_of(self: VerifyProgram, batch: Any) -> Any:
        work = real(self, batch)

        def broken(*args: Any) -> None:
            changed.nodes = self.rows(1)
            work(*args)

        return broken

    patch.setattr(verify, "ops", changed)
    patch.setattr(VerifyProgram, "work_of", work_of)


@mutant(
    "tree-without-room", "specgraph_run.decoder.admission:blocks_needed", "specgraph_run.decoder.decoder:blocks_needed"
)
def no_scratch(real: Any, request: Any, config: Any, query_len: int) -> int:
    """Requests have no KV blocks for the nodes of trees that reach past max_model_len."""
    return min(real(request, config, query_len), -(-config.max_model_len // config.block_size))
