"""A whole round as one graph: propose for what the target sampled last, verify the drafts, accept.

Between two rounds a request's state is on the device: the tokens that the target sampled, their count, the position
they begin at, hidden states, and what else `RoundState` holds. The round begins with the propose, so that a new
request needs no pass of its own: after its prefill it is a request that sampled one token (`ProposeBatch.join`). For
the same reason all lengths of a round are known before its launch to a host that has read the round before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from specgraph import ops
from specgraph.attention import Attend, AttentionLayer, AttentionMetadata, HostLengths
from specgraph.capture import BatchDescriptor, MakeAttend, ModelRunner, Pass, Phase, StepKind, dispatch, padded_size
from specgraph.draft import Drafter
from specgraph.draft.host_lengths import HostRound
from specgraph.draft.program import DraftProgram, computed_tokens
from specgraph.engine.config import EngineConfig
from specgraph.engine.join_program import JoinProgram, RoundState
from specgraph.engine.request import Running
from specgraph.engine.round_outputs import RoundOutputs
from specgraph.engine.target import TargetRunner
from specgraph.engine.tree_verify import TreeVerifyBuffers
from specgraph.engine.verify import VerifyProgram


class RoundProgram:
    """A propose and the verify after it; see `specgraph.capture.model_runner.Program`.

    Steps 0.. are those of the propose, the last one is the verify.
    """

    phase: Phase = "round"
    step_kind: StepKind = "together"
    later_rows = 1

    def __init__(
        self,
        draft: DraftProgram[Any],
        verify: VerifyProgram,
        config: EngineConfig,
        num_target_layers: int,
        state: RoundState,
        outputs: RoundOutputs,
    ) -> None:
        """
        Args:
            draft, verify: both of chains, or both of trees.
            num_target_layers: attention layers of the target; the drafter's are numbered after them.
            state, outputs: shared by the programs of one runner.
        """
        self.state, self.outputs = state, outputs
        self.draft, self.verify, self.config, self.draft_layer = draft, verify, config, num_target_layers

    def num_steps(self, batch: BatchDescriptor) -> int:
        """The drafter's passes and the verify."""
        return self.draft.passes(computed_tokens(batch)) + 1

    def batches(self) -> list[BatchDescriptor]:
        """Every captured size after rounds of every length, largest first."""
        return [replace(batch, phase="round") for batch in self.draft.batches()]

    def work_of(self, batch: BatchDescriptor) -> Callable[[Sequence[int], MakeAttend], None]:
        """Finished requests become inert; propose; the next verify's inputs; verify and accept."""
        n, k, last = batch.num_requests, batch.num_speculative_tokens, self.num_steps(batch) - 1
        before = self.verify.round.sliced(n, batch.query_len)
        verified = self.verify.sliced(n, k + 1)
        buffers = self.draft.buffers
        drafts = buffers.draft_token_ids[:n, : verified.draft_token_ids.shape[1]]
        propose = self.draft.work_of(replace(batch, phase="propose"))
        verify = self.verify.work_of(replace(batch, phase="verify", query_len=self.verify.rows(k + 1)))

        def work(steps: Sequence[int], make_attend: MakeAttend) -> None:
            ops.stop_finished(
                before.sampled_token_ids, before.num_sampled, self.state.remaining[:n], self.state.stop_token_ids[:n]
            )
            propose(range(last), _shifted(make_attend, self.draft_layer))
            ops.next_verify(
                before.sampled_token_ids, before.num_sampled, drafts, before.start_positions, verified.last_token_ids,
                verified.draft_token_ids,
            )  # fmt: skip
            if verified.draft_probs is not None and buffers.draft_probs is not None:
                verified.draft_probs.copy_(buffers.draft_probs[:n, :k])
            if isinstance(verified, TreeVerifyBuffers) and buffers.draft_parents is not None:
                verified.draft_parents.copy_(buffers.draft_parents[:n])
            verify((0,), lambda metadata, _: make_attend(metadata, last))
            self.outputs.publish(verified.round, self.state.remaining[:n], self.state.stop_token_ids[:n])

        return work

    def make_inert(self) -> None:
        """No request sampled a token."""
        self.draft.make_inert()
        self.verify.make_inert()

    def named_tensors(self) -> Mapping[str, Tensor]:
        """The buffers of both programs and the state."""
        own = {**self.state.named_tensors(), **self.outputs.named_tensors()}
        return {**self.draft.named_tensors(), **self.verify.named_tensors(), **own}

    def host_lengths(self, step: int, batch: BatchDescriptor, host_round: HostRound) -> HostLengths:
        """The same numbers as the device metadata has at `step`.

        Args:
            host_round: the round before, its counts those that `stop_finished` leaves.
        """
        if step < self.num_steps(batch) - 1:
            return self.draft.host_lengths(step, host_round)
        rows = self.verify.rows(batch.num_speculative_tokens + 1)
        return host_round.lengths(rows, [end + rows for end in host_round.accepted_ends()])


class RoundRunner(ModelRunner):
    """Runs the rounds of a target and its drafter, each as one launch. Prefill passes stay with the two."""

    def __init__(self, target: TargetRunner, drafter: Drafter, config: EngineConfig) -> None:
        model = _Pair(target, drafter)
        super().__init__(model, (*target.caches, *drafter.caches), target.platform, config, target.attention)
        self.config = config
        self.rounds_ahead = 0 if target.attention.host_parameters else config.rounds_ahead
        """Launches whose rounds the host has not read when it launches another one."""
        layers = len(target.model.attention_layers)
        self.outputs = RoundOutputs(self.platform, target.round, self.rounds_ahead + 1)
        self.state = RoundState.allocate(config.max_num_requests, self.platform.device)
        self.round_programs = {
            draft.draws_trees: RoundProgram(draft, verify, config, layers, self.state, self.outputs)
            for draft in drafter.draft_programs
            for verify in target.verify_programs
            if draft.draws_trees == verify.of_trees
        }
        """Of chains, of trees, or both, by whether they are of trees."""
        self._join = JoinProgram(target, drafter, config, self.state, self.outputs)
        self.programs += [self._join, *self.round_programs.values()]
        self._rounds: dict[tuple[int, int, int | None], Pass] = {}
        self._joins: dict[int, Pass] = {}

    def capture(self, captured: Callable[[], None] | None = None) -> None:
        """See `ModelRunner.capture`."""
        super().capture(captured)
        self.forget_rounds()  # rounds ran for warm-up

    def forget_rounds(self) -> None:
        """Count from 0 again, and let no request give a token; for rounds whose tokens nobody reads."""
        self.outputs.progress.zero_()
        self.state.remaining.zero_()

    def dispatch(self, num_rows: int, query_len: int, num_speculative_tokens: int | None = None) -> Pass:
        """The padded round over the first `num_rows` rows of the round's memory.

        Args:
            query_len: rows per request in the round before.
            num_speculative_tokens: K, one of `EngineConfig.k_candidates`; what the config says by default.
        """
        key = num_rows, query_len, num_speculative_tokens
        if (known := self._rounds.get(key)) is None:
            size = padded_size(num_rows, self.config.sizes) or num_rows
            k, tree = self.config.shape(size)
            k = k if num_speculative_tokens is None else num_speculative_tokens
            found = dispatch("round", num_rows, query_len, k, self.config.sizes, tree)
            known = self.prepare(self.round_programs[tree], found.descriptor, found.captured)
            self._rounds[key] = known
        return known

    def launch(
        self, ready: Pass, start_positions: Sequence[int] | None = None, num_sampled: Sequence[int] = ()
    ) -> None:
        """Launch a round over the requests in the round's memory.

        Args:
            ready: from `dispatch`.
            start_positions, num_sampled: of each request, as `Drafter.propose` takes them; for attention with host
                parameters.
        """
        lengths = None
        if start_positions is not None:
            batch, k = ready.batch, computed_tokens(ready.batch)
            before = HostRound(start_positions, num_sampled, batch.query_len, k, batch.num_requests)
            lengths = partial(self.round_programs[batch.tree].host_lengths, batch=batch, host_round=before)
        self.run(ready, lengths)

    def join(self, state: Running, row: int, hidden_row: int, query_len: int) -> None:
        """Give a request whose prompt was just prefilled its row, as `ProposeBatch.join` does, by one launch.

        Args:
            hidden_row: of the prompt's last token, in the last prefill pass.
            query_len: rows per request in the round before.
        """
        self._join.load(state, row, self.outputs.place(row), hidden_row)
        if (ready := self._joins.get(query_len)) is None:
            ready = self._joins[query_len] = self.prepare(self._join, BatchDescriptor("join", 1, query_len, 0))
        self.run(ready)


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
    """The same attention for a model whose layers are numbered from `by`."""

    def make(metadata: AttentionMetadata, step: int) -> Attend:
        attend = make_attend(metadata, step)

        def shifted(index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return attend(index + by, query, key, value)

        return shifted

    return make
