"""Bugs of a backend's own recorder, planner, streams and launch thread: passed by suite 2.2, failed by 3.0."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import weakref
from contextlib import suppress
from typing import Any

import pytest
from mutants.registry import mutant, replace_function
from torch import Tensor

from specgraph.cpu.checks.order import CaptureOrder, Clock
from specgraph.cpu.graph import CpuGraph
from specgraph.cpu.platform import CpuPlatform
from specgraph.cpu.pool import CpuGraphPool
from specgraph.cpu.recorder import Recorder
from specgraph.cpu.stream import CpuStream
from specgraph.cpu.tasks import Task, UpdateMode
from specgraph.ops.begin_rows import RowInputs, RowPlan, Rows


@mutant("base-freed-under-a-view")
def block_ends_with_its_tensor(patch: pytest.MonkeyPatch) -> None:
    """A block of a capture is free when the tensor it was made for is gone, also while a view of it is alive."""
    freed, free_block = set[int](), CpuGraphPool._free_block

    def result(real: Any, self: Recorder, fake: Any, alias: Any, given: Any) -> Any:
        made = real(self, fake, alias, given)
        if fake is not None and alias is None:
            pool, stream = self.pool, self._platform.current_stream().id
            address, nbytes = made.untyped_storage().data_ptr(), made.untyped_storage().nbytes()
            segment = pool._count.segments[address]
            size = -(-max(nbytes, 1) // 64) * 64

            def free() -> None:
                if address in pool._owner:
                    freed.add(address)
                    pool._freed.append((segment, address - segment.address, size, stream))  # type: ignore[arg-type]

            weakref.finalize(made, free).atexit = False
        return made

    def free_once(self: CpuGraphPool, segment: Any, offset: int, size: int, *rest: Any) -> None:
        free_block(self, segment, offset, size, *rest)
        if segment.address + offset in freed:
            freed.discard(segment.address + offset)
            self._freed = type(self._freed)(each for each in self._freed if each[:2] != (segment, offset))

    replace_function(patch, "specgraph.cpu.recorder:Recorder._result", result)
    patch.setattr(CpuGraphPool, "_free_block", free_once)


@mutant("results-freed-with-their-graph", "specgraph.cpu.graph:CpuGraph._destroy")
def close_frees_living_results(real: Any, self: CpuGraph) -> None:
    """close() of a graph gives the next capture the memory of tensors that are still alive."""
    pool = self.pool
    real(self)
    for address, segment in pool._count.segments.items():
        if pool.covers(address):
            memory = segment.memory  # type: ignore[attr-defined]
            memory[:] = b"\xff" * len(memory)


@mutant("launch-errors-swallowed", "specgraph.cpu.graph:CpuGraph._launch")
def launch_errors_swallowed(real: Any, self: CpuGraph) -> None:
    """Errors of a launch end the thread that drives it, and nobody is told."""
    with suppress(Exception):
        real(self)


@mutant("wait-forgets-earlier-waits", "specgraph.cpu.checks.order:CaptureOrder.join")
def join_replaces_the_clock(real: Any, self: CaptureOrder, stream: CpuStream, clock: Clock) -> None:
    """A stream of a capture that waits comes after what it waits for last, and after nothing else."""
    real(self, stream, clock)
    self._clocks[stream.id] = {**clock, stream.id: self._clocks[stream.id][stream.id]}


@mutant("wait-forgets-earlier-waits-eager", "specgraph.cpu.stream:merge")
def wait_replaces_the_clock(real: Any, into: Clock, other: Clock) -> None:
    """A stream that waits comes after what it waits for last, and after nothing else."""
    into.update(other)


@mutant("large-results-cut", "specgraph.cpu.tasks:Task.compile")
def results_in_blocks_of_64(real: Any, self: Task) -> None:
    """Results of more than 4,096 values are written in whole blocks of 64."""
    real(self)
    call, large = self.call, [each for _, each in self.outputs if each.numel() > 4096 and each.numel() % 64]

    def run() -> None:
        kept = [each.flatten()[-(each.numel() % 64) :].clone() for each in large]
        call()
        for each, rest in zip(large, kept, strict=True):
            each.view(-1)[-len(rest) :] = rest

    if large:
        self.call = run


@mutant("order-of-results-forgotten", "specgraph.cpu.checks.timeline:tensors_in")
def eager_results_forgotten(real: Any, *values: Any) -> list[Tensor]:
    """The order of eager work is checked for the arguments of ops, not for their results."""
    return real(*values) if len(values) > 1 else []


@mutant("order-of-results-forgotten-in-captures")
def captured_results_forgotten(patch: pytest.MonkeyPatch) -> None:
    """The order of captured work is checked for the arguments of ops, not for their results."""
    given = [0]

    def append(real: Any, self: Recorder, call: Any, *rest: Any) -> None:
        given[0] = len(call.given)
        real(self, call, *rest)

    def add(real: Any, self: CaptureOrder, stream: CpuStream, accesses: Any) -> None:
        real(self, stream, accesses[: given[0]])

    replace_function(patch, "specgraph.cpu.recorder:Recorder._append", append)
    replace_function(patch, "specgraph.cpu.checks.order:CaptureOrder.add", add)


@mutant("own-stream-handed-out", "specgraph.cpu.platform:CpuPlatform.stream")
def streams_in_turn(real: Any, self: CpuPlatform, made: list[CpuStream] = []) -> CpuStream:  # noqa: B006 (kept)
    """A device hands its 32 streams out in turn, those that the platform uses itself too."""
    if len(made) < 32:
        made.append(real(self))
        return made[-1]
    made.append(made.pop(0))
    return made[-1]


@mutant("uniform-noise-of-one", "specgraph.ops.noise:uniform")
def noise_rounded_to_one(real: Any, *args: Any) -> Tensor:
    """A number of the noise that rounds to 1 is 1."""
    numbers = real(*args)
    return numbers.where(numbers < 1 - 2.0**-24, 1.0)


@mutant("rows-without-block-uncounted-offset", "specgraph.ops:begin_rows")
def counted_without_the_offset(real: Any, given: Any, plan: RowPlan, rows: Any, *rest: Any) -> None:
    """Rows without a KV block are counted from the position of the token, not of its row."""
    count = rows.rows_without_block
    real(given, plan, rows._replace(rows_without_block=None), *rest)
    if count is not None:
        scratch = rows._replace(**{name: value.clone() for name, value in rows._asdict().items() if value is not None})
        real(given, plan._replace(position_offset=0), scratch, *rest)
        count.copy_(scratch.rows_without_block)


@mutant("rows-without-block-uncounted-end", "specgraph.ops:begin_rows")
def counted_past_the_end(real: Any, given: RowInputs, plan: RowPlan, rows: Rows, *past: Any) -> None:
    """Rows past max_model_len are counted, as long as the block table reaches."""
    others = Rows(*(None if tensor is None else tensor.clone() for tensor in rows))
    real(given, plan, rows, *past)
    if rows.rows_without_block is not None and others.rows_without_block is not None:
        real(given, plan._replace(max_model_len=given.block_table.shape[1] * plan.block_size), others, *past)
        rows.rows_without_block.copy_(others.rows_without_block)


@mutant("failed-update-drops-the-pending-one", "specgraph.cpu.tasks:UpdateMode.__init__")
def update_begins_with_a_closed_gate(real: Any, self: UpdateMode, group: Any) -> None:
    """An update closes the gate of its group when it begins."""
    real(self, group)
    group.is_updated = False
