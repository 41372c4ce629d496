"""A whole round as one graph: propose for what the target sampled last, verify the drafts, accept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from specgraph import ops
from specgraph.attention import Attend, AttentionLayer, AttentionMetadata, HostLengths
from specgraph.capture import BatchDescriptor, MakeAttend, ModelRunner, Pass, Phase, Program, Work
from specgraph.draft import Drafter
from specgraph.draft.host_lengths import HostRound
from specgraph.draft.program import DraftProgram
from specgraph.engine.target import TargetRunner
from specgraph.engine.verify import VerifyProgram


class HostState(NamedTuple):
    """The round before, as attention with host parameters needs it."""

    start_positions: Sequence[int]
    """The position of each request's first row."""
    num_sampled: Sequence[int]

    @property
    def next_positions(self) -> list[int]:
        """The position of each request's first row in the next verify; -1 for inert requests."""
        requests = zip(self.start_positions, self.num_sampled, strict=True)
        return [start + count if count else -1 for start, count in requests]


class HandOver:
    """The inputs of the verify that follows a propose: last tokens, positions and drafts of a padded batch."""

    def __init__(
        self, verify: VerifyProgram, draft: DraftProgram[Any] | None, num_requests: int, query_len: int, k: int
    ) -> None:
        """
        Args:
            draft: None where the target decodes alone; the verify's rows behind the last token then stay what they are.
            query_len: rows per request in the round before.
            k: K of the drafts, or the depth of their trees.
        """
        n = num_requests
        self._before, self._verify = verify.buffers.round.sliced(n, query_len), verify.sliced(n, k + 1)
        into = self._verify.draft_token_ids
        self._drafts = into if draft is None else draft.buffers.draft_token_ids[:n, : into.shape[1]]
        self._copied = [] if draft is None else self._verify.copied(draft.buffers)

    def __call__(self, host: HostState | None = None) -> None:
        """Run on the device; nothing of it is the host's."""
        before, verify = self._before, self._verify
        ops.next_verify(
            before.sampled_token_ids, before.num_sampled, self._drafts, before.start_positions, verify.last_token_ids,
            verify.draft_token_ids,
        )  # fmt: skip
        for into, values in self._copied:
            into.copy_(values)


class RoundProgram(Program):
    """A propose and the verify after it. Steps 0.. are those of the propose, the last one is the verify."""

    phase: Phase = "round"

    def __init__(self, draft: DraftProgram[Any], verify: VerifyProgram, num_target_layers: int) -> None:
        """
        Args:
            draft, verify: both of chains, or both of trees.
            num_target_layers: attention layers of the target; the drafter's are numbered after them.
        """
        self.draft, self.verify, self.draft_layer = draft, verify, num_target_layers

    def num_steps(self, batch: BatchDescriptor) -> int:
        return self.draft.num_steps(batch) + 1

    def batches(self) -> list[BatchDescriptor]:
        """Return every captured size after rounds of every length, largest first."""
        return [
            replace(batch, phase="round", verified=total)
            for batch in self.draft.batches()
            for total in reversed(self.verify.totals(batch.num_requests, batch.num_speculative_tokens + 1))
        ]

    def work_of(self, batch: BatchDescriptor) -> Work:
        """Return the round: propose; the next verify's inputs; verify and accept."""
        n, k, last = batch.num_requests, batch.num_speculative_tokens, self.num_steps(batch) - 1
        hand_over = HandOver(self.verify, self.draft, n, batch.query_len, k)
        propose = self.draft.work_of(replace(batch, phase="propose", verified=0))
        verify = self.verify.work_of(replace(batch, phase="verify", query_len=self.verify.rows(k + 1)))

        def work(steps: Sequence[int], make_attend: MakeAttend) -> None:
            propose(range(last), _shifted(make_attend, self.draft_layer))
            hand_over()
            verify((0,), lambda metadata, _: make_attend(metadata, last))

        return work

    def make_inert(self) -> None:
        self.draft.make_inert()
        self.verify.make_inert()

    def named_tensors(self) -> Mapping[str, Tensor]:
        return {**self.draft.named_tensors(), **self.verify.named_tensors()}

    def host_lengths(self, step: int, batch: BatchDescriptor, host: HostState) -> HostLengths:
        """Return the same numbers as the device metadata has at `step`."""
        n, k = batch.num_requests, batch.num_speculative_tokens
        if step < self.num_steps(batch) - 1:
            return self.draft.host_lengths(step, HostRound(*host, batch.query_len, k, n))
        return self.verify.plan(k + 1).host_lengths(host.next_positions, n)


class RoundRunner(ModelRunner):
    """Runs the rounds of a target and its drafter, each as one launch. Prefill passes stay with the two."""

    def __init__(self, target: TargetRunner, drafter: Drafter) -> None:
        model = _Pair(target, drafter)
        super().__init__(model, (*target.caches, *drafter.caches), target.platform, target.config, target.attention)
        layers = len(target.model.attention_layers)
        self.round_programs = {
            trees: RoundProgram(draft, target.verify_programs[trees], layers)
            for trees, draft in drafter.draft_programs.items()
        }
        """The rounds of chains, of trees, or both, by whether they are of trees."""
        self.programs += self.round_programs.values()

    def launch(self, ready: Pass, host: HostState | None) -> None:
        """Launch one round; `host` has the numbers for attention with host parameters."""
        lengths = None
        if host is not None:
            program = self.round_programs[ready.batch.tree]
            lengths = partial(program.host_lengths, batch=ready.batch, host=host)
        self.run(ready, lengths)


@dataclass(frozen=True, slots=True)
class _Pair:
    """Target and head as one model: its layers, the target's first, and its weights."""

    target: TargetRunner
    drafter: Drafter

    @property
    def attention_layers(self) -> list[AttentionLayer]:
        return [*self.target.model.attention_layers, *self.drafter.head.attention_layers]

    def weights(self) -> dict[str, Tensor]:
        named = {f"target.{name}": tensor for name, tensor in self.target.model.weights().items()}
        return named | {f"drafter.{name}": tensor for name, tensor in self.drafter.head.weights().items()}


def _shifted(make_attend: MakeAttend, by: int) -> MakeAttend:
    """Return the same attention for a model whose layers are numbered from `by`."""

    def make(metadata: AttentionMetadata, step: int) -> Attend:
        attend = make_attend(metadata, step)

        def shifted(index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return attend(index + by, query, key, value)

        return shifted

    return make
