"""The passes of a drafter's proposes: computed once per shape of batch, later found by a look-up."""

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
    """The propose of one shape of batch, n requests of query_len rows each, ready to run."""

    inputs: ProposeBatch
    """The tensors that hold the batch: the drafter's own memory, or bound tensors."""
    padding: Tensor | None
    """int32: `num_sampled` of the padded requests. None if there is no padding."""
    model_pass: Pass
    drafts: DraftTokens
    """Views of the result."""


class ProposePasses:
    """The propose passes of one drafter by shape of batch, and the batches that need no copy."""

    def __init__(
        self,
        runner: ModelRunner,
        config: DraftConfig,
        memory: SharedBuffers,
        programs: Mapping[bool, DraftProgram[Any, Any]],
    ) -> None:
        """runner: the drafter. It owns this object, which holds only a weak reference back."""
        self._runner, self._config, self._memory, self._programs = ref(runner), config, memory, programs
        self._keeps_draft_probs, self._query_len = config.keeps_draft_probs, config.query_len
        self._passes: dict[tuple[int, int, int | None, int], ProposePass] = {}
        self._in_place: dict[int, tuple[ProposeBatch, BoundTensors | None]] = {}
        """The key is the id of a pass's inputs. The value has the inputs, so that no other object gets their id, and
        the bound tensors that they are views of. None in place of bound tensors is the drafter's own memory."""

    def hand_over(self, batch: ProposeBatch, num_speculative_tokens: int | None) -> ProposePass:
        """Bring a batch to the memory that its pass reads, and make the padding inert; see `Drafter.propose`."""
        if id(batch) not in self._in_place:  # by identity: a batch of equal tensors is not in place
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
        """Return the pass for a batch of `query_len` rows per request and K drafts. The config gives both defaults.

        Raises CapacityError if there are more than max_num_requests requests. Raises ConfigError if `query_len` is not
        K + 1 for any K, or if this K was not captured.
        """
        rows = self._query_len if query_len is None else query_len
        binding = 0 if bound is None else bound.number
        key = num_requests, rows, num_speculative_tokens, binding
        try:
            known = self._passes.get(key)
        except TypeError:  # the number of rows or K is not hashable: `_make` refuses it
            known = None
        if known is None:
            known = self._make(num_requests, rows, num_speculative_tokens, bound)
            self._in_place[id(known.inputs)] = known.inputs, bound
            self._passes[key] = known  # last: a pass that can be found must already be in `_in_place`
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
        """Return the descriptor of a batch before padding. Its K is the one of the padded size. Raises as `find`."""
        if query_len not in self._config.query_lens:
            raise ConfigError(
                f"a batch of {query_len} rows per request; with this drafter's K they are "
                f"{', '.join(map(str, self._config.query_lens))} (K + 1)"
            )
        if not 1 <= num_requests <= self._config.max_num_requests:
            raise CapacityError(
                f"a batch of {num_requests} requests: this drafter takes 1 to {self._config.max_num_requests} "
                "(max_num_requests)"
            )
        # Eager pads too: the last bit of a matmul depends on the number of rows.
        size = padded_size(num_requests, self._config.sizes) or num_requests
        k, tree = self._config.shape(size) if asked is None else DraftShape(asked)
        if (k, tree) not in self._config.shapes_at(size):
            there = [str(each.num_speculative_tokens) for each in self._config.shapes_at(size) if not each.tree]
            raise ConfigError(
                f"K {k} is none of those for batches of {size} requests ({', '.join(there) or 'they draft trees'}): "
                "list each K in k_candidates when you make the drafter"
            )
        return BatchDescriptor("propose", num_requests, query_len, k, tree=tree, binding=binding)
