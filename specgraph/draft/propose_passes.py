"""The passes of a drafter's proposes, worked out once for each shape of batch: later ones cost the host a look-up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import ref

from torch import Tensor

from specgraph.capture import BatchDescriptor, ModelRunner, Pass, dispatch, padded_size
from specgraph.config import DraftConfig, DraftShape
from specgraph.draft.batch import DraftTokens, ProposeBatch, SharedBuffers
from specgraph.draft.batch_checks import check_shapes, check_types, refuse_sampling
from specgraph.draft.bound import BoundTensors
from specgraph.draft.program import DraftProgram
from specgraph.errors import CapacityError, ConfigError
from specgraph.validation import checked


@dataclass(frozen=True, slots=True)
class ProposePass:
    """A propose for n requests after a round of query_len rows each, ready to run."""

    inputs: ProposeBatch
    """The tensors that are written for these requests: the drafter's own memory, or bound ones."""
    padding: Tensor | None
    """int32: `num_sampled` of the padded requests; None where there are none."""
    model_pass: Pass
    drafts: DraftTokens
    """Views of the result."""


class ProposePasses:
    """The passes of one drafter, and which batches they read in place: its own memory, or bound tensors."""

    def __init__(
        self,
        runner: ModelRunner,
        config: DraftConfig,
        memory: SharedBuffers,
        programs: Mapping[bool, DraftProgram[Any, Any]],
    ) -> None:
        """runner: owns this object, which doesn't keep it alive; memory: what the target's rounds leave."""
        self._runner, self._config, self._memory, self._programs = ref(runner), config, memory, programs
        self._keeps_draft_probs, self._query_len = config.keeps_draft_probs, config.query_len
        self._passes: dict[tuple[int, int, int | None, int], ProposePass] = {}
        self._in_place: dict[int, tuple[ProposeBatch, BoundTensors | None]] = {}
        """A pass's inputs and the tensors that they are views of, None for the drafter's own memory; by the id of the
        inputs, which stays theirs as they are kept here."""

    def hand_over(self, batch: ProposeBatch, num_speculative_tokens: int | None) -> ProposePass:
        """Bring a batch to where its pass reads it, with the requests behind it inert; see `Drafter.propose`."""
        if id(batch) not in self._in_place:  # the object itself
            check_types("propose", batch, self._memory.num_sampled.device)
            if not self._config.sampled:
                refuse_sampling("propose", batch)
            ready = self.find(batch.num_requests, batch.query_len, num_speculative_tokens)
            check_shapes("propose", batch, ready.inputs, self._keeps_draft_probs, dtypes=self._config.debug)
            self._memory.load(batch, ready.inputs, self._keeps_draft_probs)
            return ready
        bound = self._in_place[id(batch)][1]
        ready = self.find(batch.num_requests, batch.query_len, num_speculative_tokens, bound)
        if bound is not None:
            bound.check_addresses()
        if ready.padding is not None:
            ready.padding.zero_()
        return ready

    def find(
        self,
        num_requests: int,
        query_len: int | None,
        num_speculative_tokens: int | None = None,
        bound: BoundTensors | None = None,
    ) -> ProposePass:
        """Return the pass for a batch of `query_len` rows per request and K drafts; what the config says by default.

        CapacityError for more requests than max_num_requests; ConfigError where no K makes rounds of so many rows, or
        this K was not captured.
        """
        rows = self._query_len if query_len is None else query_len
        binding = 0 if bound is None else bound.number
        key = num_requests, rows, num_speculative_tokens, binding
        try:
            known = self._passes.get(key)
        except TypeError:  # a number of rows or a K that cannot be a key: `_make` refuses it
            known = None
        if known is None:
            known = self._make(num_requests, rows, num_speculative_tokens, bound)
            self._in_place[id(known.inputs)] = known.inputs, bound
            self._passes[key] = known  # last: whoever finds it knows that it is in place
        return known

    @checked
    def _make(
        self, num_requests: int, query_len: int, num_speculative_tokens: int | None, bound: BoundTensors | None
    ) -> ProposePass:
        runner = self._runner()
        assert runner is not None, "the drafter owns its passes"
        memory, binding = (self._memory, 0) if bound is None else (bound, bound.number)
        found = dispatch(self._batch(num_requests, query_len, num_speculative_tokens, binding), self._config.sizes)
        n, padded, k = num_requests, found.descriptor.num_requests, found.descriptor.num_speculative_tokens
        program = self._programs[found.descriptor.tree]
        drafts = program.sliced(n, query_len, k)
        inputs = memory.sliced(n, query_len)
        return ProposePass(
            inputs=inputs if self._config.sampled else replace(inputs, temperature=None, seeds=None),
            padding=memory.num_sampled[n:padded] if n < padded else None,
            model_pass=runner.prepare(program, found.descriptor, found.captured),
            drafts=DraftTokens(
                drafts.draft_token_ids, drafts.draft_probs, found, drafts.draft_parents, drafts.confidence
            ),
        )

    def _batch(self, num_requests: int, query_len: int, asked: int | None, binding: int) -> BatchDescriptor:
        """Return a batch at its own size, with the drafts of the size that it is padded to; ConfigError and
        CapacityError as in `find`."""
        if query_len not in self._config.query_lens:
            raise ConfigError(
                f"a round of {query_len} rows per request; with this drafter's K they are "
                f"{', '.join(map(str, self._config.query_lens))} (K + 1)"
            )
        if not 1 <= num_requests <= self._config.max_num_requests:
            raise CapacityError(
                f"a batch of {num_requests} requests: this drafter takes 1 to {self._config.max_num_requests} "
                "(max_num_requests)"
            )
        # Eager pads too: matmuls change their last bit with the number of rows.
        size = padded_size(num_requests, self._config.sizes) or num_requests
        k, tree = self._config.shape(size) if asked is None else DraftShape(asked)
        if (k, tree) not in self._config.shapes_at(size):
            there = [str(each.num_speculative_tokens) for each in self._config.shapes_at(size) if not each.tree]
            raise ConfigError(
                f"K {k} is none of those for batches of {size} requests ({', '.join(there) or 'they draft trees'}): "
                "list each K in k_candidates when you make the drafter"
            )
        return BatchDescriptor("propose", num_requests, query_len, k, tree=tree, binding=binding)
