"""Tensors of the engine's own that a drafter's graphs read by themselves, so that a propose is one launch.

`Drafter.bind` is told of them once, before the capture. The hand-over, one op that copies them into the drafter's
memory, is then the first node of the captured graph instead of a launch of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from torch import Tensor

from specgraph import ops
from specgraph.capture import BatchDescriptor, Fingerprint, MakeAttend, Phase, StepKind, Work, fingerprint
from specgraph.draft.config import DraftConfig
from specgraph.draft.program import DraftProgram
from specgraph.draft.round import ProposeBatch, RoundBuffers, copy_round
from specgraph.errors import ConfigError


class BoundTensors:
    """A round of the largest batch in tensors of the engine's own, which stay where they are."""

    def __init__(self, number: int, tensors: ProposeBatch, memory: RoundBuffers, config: DraftConfig) -> None:
        """
        Args:
            number: of this binding, from 1 on.
            tensors: R = max_num_requests, Q = the largest query_len: sampled_token_ids [R, Q], aux_hidden
                [R * Q, aux_size], block_table [R, at most the columns of the drafter's], the others [R]; dtypes as
                `ProposeBatch` says. Temperatures and seeds only where drafts are drawn by temperature.
            memory: the drafter's own, where the graphs copy them.
            config: of the drafter.

        Raises:
            ConfigError: a tensor is missing, or has the wrong shape or dtype.
        """
        self.number = number
        self._of = _checked(tensors, memory.sliced(config.max_num_requests, config.query_len), config.keeps_draft_probs)
        self._named = {
            f"bound {number}.{field.name}": value
            for field in fields(self._of)
            if (value := getattr(self._of, field.name)) is not None
        }
        self._tensors = tuple(self._named.values())
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        self._places: Fingerprint = fingerprint(self._named, self._named)

    def sliced(self, num_requests: int, query_len: int) -> ProposeBatch:
        """The first `num_requests` requests of a round of `query_len` rows each: views.

        Sampled tokens are the first `query_len` columns; hidden states are packed, the first
        num_requests * query_len rows.
        """
        n, rows, of = num_requests, num_requests * query_len, self._of
        return ProposeBatch(
            sampled_token_ids=of.sampled_token_ids[:n, :query_len],
            num_sampled=of.num_sampled[:n],
            start_positions=of.start_positions[:n],
            aux_hidden=of.aux_hidden[:rows],
            block_table=of.block_table[:n],
            temperature=None if of.temperature is None else of.temperature[:n],
            seeds=None if of.seeds is None else of.seeds[:n],
        )

    @property
    def num_sampled(self) -> Tensor:
        """int32 [R]."""
        return self._of.num_sampled

    def check_addresses(self) -> None:
        """Refuse tensors whose memory was exchanged since `Drafter.bind`.

        Raises:
            StaleInputError: the graphs would read the old memory.
        """
        if [tensor.data_ptr() for tensor in self._tensors] != self._addresses:
            self._places.check(self._named, "of a bound propose")

    def named_tensors(self) -> Mapping[str, Tensor]:
        """The tensors by name, for the read-set."""
        return self._named


class BoundProgram:
    """A draft program whose step 0 begins with the copy from bound tensors; see `specgraph.capture.Program`."""

    phase: Phase = "propose"

    def __init__(self, program: DraftProgram[Any], bound: BoundTensors, memory: RoundBuffers) -> None:
        self.program, self._bound, self._memory = program, bound, memory

    @property
    def step_kind(self) -> StepKind:
        """As the draft program's."""
        return self.program.step_kind

    @property
    def later_rows(self) -> int:
        """As the draft program's."""
        return self.program.later_rows

    def num_steps(self, batch: BatchDescriptor) -> int:
        """As the draft program's."""
        return self.program.num_steps(batch)

    def batches(self) -> list[BatchDescriptor]:
        """Those of the draft program, once more for these tensors."""
        return [replace(batch, binding=self._bound.number) for batch in self.program.batches()]

    def work_of(self, batch: BatchDescriptor) -> Work:
        """The copy where step 0 is computed, then the draft program's work."""
        work, sampled = self.program.work_of(batch), self.program.config.keeps_draft_probs
        into = self._memory.sliced(batch.num_requests, batch.query_len)
        source = self._bound.sliced(batch.num_requests, batch.query_len)

        def copy_and_work(steps: Sequence[int], make_attend: MakeAttend) -> None:
            if 0 in steps:
                copy_round(ops.load_round, source, into, into, sampled)
            work(steps, make_attend)

        return copy_and_work

    def make_inert(self) -> None:
        """No request sampled a token, in the engine's tensors either: they are what the warm-up copies."""
        self.program.make_inert()
        self._bound.num_sampled.zero_()

    def named_tensors(self) -> Mapping[str, Tensor]:
        """The bound tensors; the draft program names its own."""
        return self._bound.named_tensors()


def _checked(tensors: ProposeBatch, wanted: ProposeBatch, sampled: bool) -> ProposeBatch:
    """The tensors that a propose reads, each of the shape and dtype of the drafter's own."""
    if not sampled:
        tensors = replace(tensors, temperature=None, seeds=None)
    for field in fields(wanted):
        own: Tensor = getattr(wanted, field.name)
        given: Tensor | None = getattr(tensors, field.name)
        if given is None:
            if sampled:
                raise ConfigError(f"bind: a sampled drafter needs {field.name}, and it is None")
            continue
        shape = list(own.shape)
        if field.name == "block_table" and given.dim() == 2 and given.shape[1] < own.shape[1]:
            shape[1] = given.shape[1]
        if list(given.shape) != shape or given.dtype != own.dtype:
            raise ConfigError(
                f"bind: {field.name} is {list(given.shape)} {given.dtype}, expected {shape} {own.dtype}: tensors of "
                "the largest batch"
            )
    return tensors
