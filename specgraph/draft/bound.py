"""Tensors of the engine's own that a drafter's graphs read by themselves, so that a propose is one launch.

`Drafter.bind` is told of them once, before the capture. The hand-over, one op that copies them into the drafter's
memory, is then the first node of the captured graph instead of a launch of its own.
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
    """A round of the largest batch in tensors of the engine's own, which stay where they are."""

    @checked
    def __init__(self, number: Count, tensors: ProposeBatch, memory: SharedBuffers, config: DraftConfig) -> None:
        """
        Args:
            number: of this binding, from 1 on.
            tensors: R = max_num_requests, Q = the largest query_len: sampled_token_ids [R, Q], aux_hidden
                [R * Q, aux_size], block_table [R, at most the columns of the drafter's], the others [R]; dtypes as
                `ProposeBatch` says. Temperatures and seeds only where drafts are drawn by temperature.
            memory: the drafter's own, where the graphs copy them.
            config: of the drafter.

        Raises:
            ConfigError: a tensor is missing, or has the wrong shape, dtype or device.
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
        """Return the first `num_requests` requests of a round of `query_len` rows each: views.

        Sampled tokens are the first `query_len` columns; hidden states are packed, the first
        num_requests * query_len rows.
        """
        self.check_addresses()
        return self._of.views(num_requests, rows=query_len)

    @property
    def num_sampled(self) -> Tensor:
        """int32 [R]."""
        return self._of.num_sampled

    def check_addresses(self) -> None:
        """Raise StaleInputError where memory was exchanged since `Drafter.bind`: the graphs would read the old one."""
        if [tensor.data_ptr() for tensor in self._tensors] != self._addresses:
            self._places.check(self._named, "of a bound propose")

    def named_tensors(self) -> Mapping[str, Tensor]:
        return self._named
