"""A host engine's own tensors that a drafter's graphs read by themselves, so that a propose is one launch.

`Drafter.bind` gets them once, before the capture. The op that copies them to the drafter's memory is then the first
node of the captured graph instead of a launch of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from specgraph.capture import Fingerprint, fingerprint
from specgraph.config import DraftConfig
from specgraph.draft.batch import ProposeBatch, SharedBuffers
from specgraph.draft.batch_checks import check_shapes, check_types, refuse_sampling
from specgraph.ops.tensor_forms import check_forms
from specgraph.validation import Count, Requests, Tokens, checked


class BoundTensors:
    """A host engine's tensors for the largest batch. Their addresses must not change."""

    @checked
    def __init__(self, number: Count, tensors: ProposeBatch, memory: SharedBuffers, config: DraftConfig) -> None:
        """
        Args:
            number: the number of this binding, from 1 on.
            tensors: see `Drafter.bind`. Temperatures and seeds are kept only if drafts are drawn by temperature.
            memory: the drafter's own memory, to which the graphs copy the tensors.
        """
        check_types("bind", tensors, memory.num_sampled.device)
        if not config.sampled:
            refuse_sampling("bind", tensors)
        self.number = number
        sampled, largest = config.keeps_draft_probs, memory.sliced(config.max_num_requests, config.query_len)
        check_shapes("bind", tensors, largest, sampled, dtypes=True)
        check_forms("bind", {"num_sampled": tensors.num_sampled}, {"num_sampled": "int32 [R]"}, written=True)
        self._of = tensors if sampled else replace(tensors, temperature=None, seeds=None)
        self._named = self._of.named_tensors(f"bound {number}")
        self._tensors = tuple(self._named.values())
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        self._places: Fingerprint = fingerprint(self._named, self._named)

    @checked
    def sliced(self, num_requests: Requests, query_len: Tokens) -> ProposeBatch:
        """Return views of the first `num_requests` requests of a batch of `query_len` rows per request.

        Sampled tokens are the first `query_len` columns. Hidden states are packed: they are the first
        num_requests * query_len rows.
        """
        self.check_addresses()
        return self._of.views(num_requests, rows=query_len)

    @property
    def num_sampled(self) -> Tensor:
        """int32 [R]."""
        return self._of.num_sampled

    def check_addresses(self) -> None:
        """Raise StaleInputError if the memory of a tensor was replaced since `Drafter.bind`: the graphs would read the
        old memory."""
        if [tensor.data_ptr() for tensor in self._tensors] != self._addresses:
            self._places.check(self._named, "of a bound propose")

    def named_tensors(self) -> Mapping[str, Tensor]:
        return self._named
