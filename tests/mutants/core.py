"""Broken parts of the core: buffers, dispatch, runner, update plan, host lengths, drafter."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import specgraph_run.decoder.verify_buffers
from mutants.registry import mutant
from torch import Tensor

import specgraph.capture.model_runner
import specgraph.draft.buffers
import specgraph.draft.program
from specgraph.capture import BatchDescriptor, GraphRunner, Program, UpdatePlan
from specgraph.capture.graph_runner import Recording
from specgraph.capture.update_plan import Task
from specgraph.draft import Drafter, DraftTokens, SharedBuffers
from specgraph.draft.chain import ChainProgram
from specgraph.draft.host_lengths import HostNumbers
from specgraph.draft.propose_passes import ProposePasses

model_runner = specgraph.capture.model_runner


@mutant("stale-metadata-rebound", "specgraph.draft:SharedBuffers.load")
def stale_metadata_rebound(real: Any, self: SharedBuffers, batch: Any, *rest: Any, kept: list[Tensor] = []) -> None:  # noqa: B006 (kept)
    """Each round's counts are a new tensor instead of the old one, written in place."""
    kept.append(self.num_sampled)
    object.__setattr__(self, "num_sampled", self.num_sampled.clone())
    real(self, batch, *rest)


@mutant("stale-metadata-copied-late")
def stale_metadata_copied_late(patch: pytest.MonkeyPatch) -> None:
    """The block table is copied after the replay that needs it."""
    real_load, real_run, late = SharedBuffers.load, Drafter.run, dict[int, Tensor]()

    def load(self: SharedBuffers, batch: Any, *rest: Any) -> None:
        before = self.block_table.clone()
        real_load(self, batch, *rest)
        late[id(self)] = self.block_table.clone()
        if before.any():
            self.block_table.copy_(before)

    def run(self: Any, *args: Any, **options: Any) -> None:
        real_run(self, *args, **options)
        shared = self.buffers.shared
        shared.block_table.copy_(late.pop(id(shared), shared.block_table))

    patch.setattr(SharedBuffers, "load", load)
    patch.setattr(Drafter, "run", run)


@mutant("stale-padding-rows", "specgraph.draft.batch:SharedBuffers.load")
def stale_padding_rows(real: Any, self: SharedBuffers, batch: Any, *rest: Any) -> None:
    """The rows after a smaller batch keep the counts of the last, larger one."""
    tail = self.num_sampled[batch.num_requests :].clone()
    real(self, batch, *rest)
    self.num_sampled[batch.num_requests :].copy_(tail)


@mutant("stale-padding-rows-bound", "specgraph.draft.propose_passes:ProposePasses._make")
def bound_padding_alive(real: Any, self: ProposePasses, *args: Any) -> Any:
    """The rows after a smaller batch keep the counts that the engine left in its own, bound tensors."""
    made, bound = real(self, *args), args[-1]
    return made if bound is None else replace(made, padding=None)


@mutant("capture-key-mismatch")
def capture_key_mismatch(patch: pytest.MonkeyPatch) -> None:
    """Graphs are captured under another key than requests are dispatched to."""
    real_capture, real_cut = Drafter.capture, model_runner.cut_into_launches

    def under_another_key(*args: Any) -> Any:
        found = real_cut(*args)
        return tuple(replace(one, descriptor=replace(one.descriptor, num_speculative_tokens=99)) for one in found)

    def capture(self: Drafter, *args: Any) -> None:
        with pytest.MonkeyPatch.context() as during:
            during.setattr(model_runner, "cut_into_launches", under_another_key)
            real_capture(self, *args)

    patch.setattr(Drafter, "capture", capture)


@mutant("capture-at-request-time")
def capture_at_request_time(patch: pytest.MonkeyPatch) -> None:
    """Nothing is captured at start-up; the first request does it."""
    real_capture, real_run = Drafter.capture.__wrapped__, Drafter.run  # a call inside of another one is refused

    def run(self: Drafter, *args: Any, **options: Any) -> None:
        if self.graphs is not None and not self.graphs.descriptors:
            real_capture(self)
        real_run(self, *args, **options)

    patch.setattr(Drafter, "capture", lambda self, *args: None)
    patch.setattr(Drafter, "run", run)


@mutant("num-reqs-unpadded", "specgraph.draft.host_lengths:HostNumbers.lengths")
def num_reqs_unpadded(real: Any, self: HostNumbers, *args: Any) -> Any:
    """Host lengths have one entry per real request instead of one per request of the graph."""
    return real(replace(self, padded=len(self.start_positions)), *args)


@mutant("k-equals-2", "specgraph.capture.model_runner:cut_into_launches")
def k_equals_2(real: Any, lowering: Any, program: Program, batch: BatchDescriptor) -> Any:
    """The later step is left out where there are two draft tokens."""
    first, *later = real(lowering, program, batch)
    if batch.phase == "propose" and program.num_steps(batch) == 2:
        return (replace(first, captured_steps=(0,), steps=(0,)),)
    return (first, *later)


@mutant("step-ladder-overpadding", "specgraph.draft.drafter:Drafter._body")
def step_ladder_overpadding(
    real: Any, self: Drafter, program: Any, batch: BatchDescriptor, launch: Any, *rest: Any
) -> Any:
    """Later steps are padded on step 0's ladder: K + 1 times the rows."""
    if launch.descriptor.phase == "step":
        rows = batch.num_requests * (batch.num_speculative_tokens + 1)
        batch = replace(batch, num_requests=min(rows, self.config.max_num_requests))
    return real(self, program, batch, launch, *rest)


@mutant("size-truncated", "specgraph.config:capture_sizes")
def size_truncated(real: Any, most: int, asked: Any = None) -> tuple[int, ...]:
    """Named sizes are cut to even numbers without a word."""
    sizes = real(most, asked)
    return (*sorted({max(1, size // 2 * 2) for size in sizes[:-1]} - {sizes[-1]}), sizes[-1])


@mutant("block-misaligned-sizes", "specgraph.capture:BatchDescriptor.num_tokens")
def block_misaligned_sizes(real: Any, self: BatchDescriptor) -> int:
    """The number of rows is padded to a multiple of eight, independent of the rows per request."""
    return -(-self.num_requests * self.query_len // 8) * 8


@mutant("buffer-smaller-than-padded-size", "specgraph.draft.program:Allocation")
def buffer_smaller(real: Any, config: Any, *args: Any) -> Any:
    """Buffers hold the largest default size below the maximum instead of the maximum."""
    return real(replace(config, max_num_requests=config.max_num_requests // 2, capture_sizes=None), *args)


@mutant("graph-reuses-target-metadata")
def graph_reuses_target_metadata(patch: pytest.MonkeyPatch) -> None:
    """The drafter's graphs use the target's metadata tensors where they have the same shape."""
    real = specgraph.draft.buffers.allocate_metadata
    made: dict[Any, Any] = {}

    def allocate_metadata(requests: int, query_lens: Any, block_table: Tensor, tree_len: int = 0) -> Any:
        own = real(requests, query_lens, block_table, tree_len)
        key = requests, max(query_lens), tree_len, block_table.shape, block_table.device
        shared = made.setdefault(key, own)
        return replace(shared, query_start_loc=own.query_start_loc, start_locs=own.start_locs)

    for module in (specgraph.draft.buffers, specgraph_run.decoder.verify_buffers):
        patch.setattr(module, "allocate_metadata", allocate_metadata)


@mutant("update-key-ignored", "specgraph.capture.update_plan:UpdatePlan.apply")
def update_key_ignored(real: Any, self: UpdatePlan, values: Any) -> None:
    """An update zips values with captured tasks: unknown keys and missing ones are passed over."""
    for tasks, lengths in zip(self.tasks.values(), values.values(), strict=False):
        for task in tasks:
            with self.platform.task_update(task.group):
                task.prepare(lengths)()


@mutant("update-prefill-decode-mixed")
def update_prefill_decode_mixed(patch: pytest.MonkeyPatch) -> None:
    """Captured tasks are kept in one table by size, so that graphs of one size share them."""
    real, by_size = UpdatePlan.__init__, dict[int, Any]()

    @functools.wraps(real)
    def init(self: UpdatePlan, platform: Any, num_requests: int, *tasks: Any) -> None:
        real(self, platform, num_requests, *tasks)
        object.__setattr__(self, "tasks", by_size.setdefault(num_requests, {}))

    def add(self: UpdatePlan, key: Any, group: Any, prepare: Any) -> None:
        others = [task for task in self.tasks.get(key.step, []) if task.key != key]
        self.tasks[key.step] = [*others, Task(key, group, prepare)]

    patch.setattr(UpdatePlan, "__init__", init)
    patch.setattr(UpdatePlan, "add", add)


@mutant("rejected-tokens-in-lengths", "specgraph.draft.host_lengths:HostNumbers.counts")
def rejected_tokens_in_lengths(real: Any, self: Any) -> Any:
    """Host lengths of the later steps count every row of the round, rejected ones too."""
    return [self.query_len] * len(self.start_positions)


@mutant("per-step-lengths-not-updated", "specgraph.draft.chain:ChainProgram.host_lengths")
def per_step_lengths_not_updated(real: Any, self: ChainProgram, step: int, host_numbers: HostNumbers) -> Any:
    """Every later step gets the host lengths of the first of them."""
    return real(self, min(step, 1), host_numbers)


@mutant("output-aliases-graph-buffer", "specgraph.draft.drafter:Drafter.propose")
def output_aliases_graph_buffer(real: Any, self: Drafter, batch: Any, **options: Any) -> DraftTokens:
    """propose hands out the buffers that the next replay writes."""
    drafts = real(self, batch, **options)
    n, k = drafts.token_ids.shape
    b = self.buffers
    probs = None if b.draft_probs is None else b.draft_probs[:n, :k]
    return DraftTokens(b.draft_token_ids[:n, :k], probs, drafts.dispatch)


@mutant("weights-moved", "specgraph.capture.read_set:Fingerprint.check")
def weights_moved(real: Any, self: Any, named: Any, graph: Any) -> None:
    """The addresses of the weights are not compared with those at capture."""


@mutant("exec-budget")
def exec_budget(patch: pytest.MonkeyPatch) -> None:
    """The runner doesn't count its graphs."""
    patch.setattr(GraphRunner, "graph_count", property(lambda self: 0))
    real = Recording._begin

    def begin(self: Any) -> None:
        self._live_graphs = 0
        real(self)

    patch.setattr(Recording, "_begin", begin)


@mutant("dynamic-k-negative")
def dynamic_k_negative(patch: pytest.MonkeyPatch) -> None:
    """The key of a captured graph leaves K out."""

    def key(self: BatchDescriptor) -> tuple[Any, ...]:
        return self.phase, self.num_requests, self.query_len

    patch.setattr(BatchDescriptor, "__hash__", lambda self: hash(key(self)))
    patch.setattr(BatchDescriptor, "__eq__", lambda self, other: key(self) == key(other))


@mutant("unsampled-counted", "specgraph_run.decoder.ops:count_tokens")
def unsampled_counted(real: Any, tokens: Any, counts: Any) -> Any:
    """A verify counts the places after its sampled tokens as token 0."""
    return real(tokens.clamp(min=0), counts)


@mutant("draft-length-without-offset", "specgraph.draft.chain:ChainProgram.host_lengths")
def own_row_left_out(real: Any, self: Any, step: int, host_numbers: Any) -> Any:
    """Host lengths of a draft model's later steps leave out the row itself."""
    lengths, offset = real(self, step, host_numbers), self.position_offset if step else 0
    return lengths._replace(seq_lens=[max(length - offset, 0) for length in lengths.seq_lens])
