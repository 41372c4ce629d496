"""The rows of prompts in an engine's pass, written into the drafter's KV cache by captured graphs.

The rows of a prompt are cut into segments of SEGMENT rows, and each segment is a request of a uniform batch. So the ops
and kernels of a target's round serve prompts of any lengths side by side, and a graph depends on the number of segments
alone. The keys of all segments are stored before any of them attends, and later passes see those of earlier ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from specgraph.attention.metadata import AttentionMetadata, allocate_block_table, allocate_metadata
from specgraph.attention.rows import PrefillRows
from specgraph.buffers import Axes, Buffers
from specgraph.capture import BatchDescriptor, MakeAttend, ModelRunner, Phase, Program, Work, padded_size
from specgraph.capture.transfers import write
from specgraph.draft import ProposeBatch
from specgraph.draft.buffers import PromptRows
from specgraph.draft.program import DraftProgram
from specgraph_plugin.verify_output import VerifyOutput, fill_batch

SEGMENT = 16
"""Rows of a segment; the last one of a chunk may have fewer."""

SIZES = (8, 32, 64, 128)
"""Segments of the captured passes: few, because each size has kernels to compile at start-up. A pass of an engine with
more rows becomes several."""


class PromptChunk(NamedTuple):
    """Consecutive rows of one prompt in an engine's pass, as the host knows them."""

    first_row: int
    num_rows: int
    position: int
    """The place of the first row in its prompt."""
    table_row: int
    """The row of the request in `PromptPass.table`."""
    next_row: int | None
    """The place in `PromptPass.next_tokens` of the token after the chunk; None where the prompt ends with the chunk and
    the round of this pass begins with its last row (`VerifyOutput.first_rows`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPass:
    """The tensors of an engine's pass over T rows, some of which are in prompts."""

    chunks: Sequence[PromptChunk]
    token_ids: Tensor
    """integer [>= T]: the token of each row."""
    next_tokens: Tensor
    """integer, the tokens after chunks: the prompt's next one, or the one that the target sampled."""
    hidden_states: Sequence[Tensor]
    """[>= T, size] each: those that the drafter takes of the target, side by side."""
    table: Tensor
    """See `VerifyOutput.table`."""
    table_of_slots: bool = False


class Segments(NamedTuple):
    """The numbers of N segments: a list of N each on the host, int64 [N] each on the device."""

    first_rows: Any
    num_rows: Any
    positions: Any
    table_rows: Any
    next_rows: Any
    """The place of the token after the segment in `PromptPass.next_tokens`; -1 where it is that of the row behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentBuffers(Buffers):
    """The persistent tensors of passes over up to N segments."""

    segments: Annotated[Tensor, Axes("numbers")]
    """int64 [5 * N]: the numbers of `Segments`, packed by the N of the pass."""
    inputs: ProposeBatch
    """The rows of the segments, of SEGMENT rows each."""
    metadata: AttentionMetadata

    def sliced(self, size: int) -> SegmentBuffers:
        return self.views(size, rows=SEGMENT, numbers=len(Segments._fields))


class PromptProgram(Program):
    """Writes the drafter's KV of prompt rows."""

    phase: Phase = "prefill"

    def __init__(self, program: DraftProgram[Any, Any], max_num_rows: int) -> None:
        """
        Args:
            program: a draft program of the head.
            max_num_rows: of an engine's pass; no pass here has more, unless it is one segment.
        """
        head, config, device = program.head, program.config, program.buffers.shared.seeds.device
        most = max(min(max_num_rows // SEGMENT, SIZES[-1]) // 2 * 2, 1)  # even: each of `Segments` is aligned
        self.sizes = (*(size for size in SIZES if size < most), most)
        self._program, self._limits = program, config.limits
        n, rows = self.sizes[-1], self.sizes[-1] * SEGMENT

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        columns = -(-(config.max_model_len + SEGMENT) // config.block_size)
        table = allocate_block_table(n, _whole(columns), device)
        self.buffers = SegmentBuffers(
            segments=zeros(len(Segments._fields) * n),
            inputs=ProposeBatch(
                sampled_token_ids=zeros(n, SEGMENT),
                num_sampled=zeros(n, dtype=torch.int32),
                start_positions=zeros(n),
                aux_hidden=zeros(rows, head.aux_size, dtype=head.dtype),
                block_table=table,
            ),
            metadata=allocate_metadata(n, [SEGMENT], table),
        )
        self._by_size = {size: self.buffers.sliced(size) for size in self.sizes}
        self._first_row = zeros(1)

    def num_steps(self, batch: BatchDescriptor) -> int:
        return self._program.prefill_passes

    def batches(self) -> list[BatchDescriptor]:
        return [BatchDescriptor("prefill", size, SEGMENT, 0) for size in reversed(self.sizes)]

    def work_of(self, batch: BatchDescriptor) -> Work:
        """Return the work: positions, slots and lengths of the rows; then the head."""
        b, plan = self._by_size[batch.num_requests], PrefillRows.of(SEGMENT, self._limits)

        def work(steps: Sequence[int], make_attend: MakeAttend) -> None:
            at, rows = b.metadata, b.inputs
            plan.fill(rows.start_positions, at.block_table, rows.num_sampled, at.places)
            # Nobody reads the head's output: it computes that of one row.
            prompts = PromptRows(rows.sampled_token_ids.view(-1), rows.aux_hidden, at, self._first_row)
            self._program.prefill(prompts, make_attend)

        return work

    def make_inert(self) -> None:
        self.buffers.inputs.num_sampled.zero_()

    def named_tensors(self) -> Mapping[str, Tensor]:
        return {**self.buffers.named_tensors("prompts"), "prompts.row": self._first_row}

    def run(self, runner: ModelRunner, given: PromptPass) -> None:
        """Write the rows of all chunks, in one pass or in several; this is one of the runner's programs."""
        # The round that begins with a prompt's last row writes it, but for keys that lie at their own token's position.
        segments = segments_of(given.chunks, writes_ends=bool(self._program.position_offset))
        for first in range(0, len(segments.first_rows), self.sizes[-1]):
            part = Segments(*(numbers[first : first + self.sizes[-1]] for numbers in segments))
            size = padded_size(len(part.first_rows), self.sizes)
            assert size is not None
            self._load(given, part, self._by_size[size])
            runner.run(runner.prepare(self, BatchDescriptor("prefill", size, SEGMENT, 0)))

    def _load(self, given: PromptPass, part: Segments, into: SegmentBuffers) -> None:
        """Bring segments, their tokens, hidden states and blocks to where the graph reads them."""
        n, size = len(part.first_rows), into.metadata.num_requests
        padding = [0] * (size - n)
        write(into.segments, [number for numbers in part for number in (*numbers, *padding)])
        now = Segments(*into.segments.view(-1, size)[:, :n])
        takes_own_tokens = bool(self._program.position_offset)
        end = VerifyOutput(
            token_ids=given.token_ids,
            num_sampled=now.num_rows,
            starts=now.positions,
            table=given.table,
            hidden_states=given.hidden_states,
            first_rows=now.first_rows,
            table_of_slots=given.table_of_slots,
            table_rows=now.table_rows,
            last_tokens=None if takes_own_tokens else given.next_tokens,
            last_rows=None if takes_own_tokens else now.next_rows,
        )
        max_model_len, block_size = self._limits
        # No row of a prompt sees a block further on: those of an earlier pass stay in the table there.
        columns = _whole(-(-(max(part.positions) + SEGMENT) // block_size))
        inputs = replace(into.inputs, block_table=into.inputs.block_table[:, :columns])
        fill_batch(end, inputs, max_model_len, block_size, 0)


def _whole(columns: int) -> int:
    """Round a number of columns up to one that the kernel of `fill_batch` knows from its compilation at start-up."""
    return -(-columns // 16) * 16


def segments_of(chunks: Sequence[PromptChunk], writes_ends: bool) -> Segments:
    """Cut chunks into segments, in order.

    Args:
        writes_ends: the last row of a prompt is in a segment too, where its chunk has no `next_row`.
    """
    made = Segments([], [], [], [], [])
    for chunk in chunks:
        rows = chunk.num_rows - (chunk.next_row is None and not writes_ends)
        more = -(-rows // SEGMENT) - 1  # before the last one
        if more < 0:
            continue
        made.first_rows.extend(range(chunk.first_row, chunk.first_row + rows, SEGMENT))
        made.num_rows.extend([SEGMENT] * more + [rows - more * SEGMENT])
        made.positions.extend(range(chunk.position, chunk.position + rows, SEGMENT))
        made.table_rows.extend([chunk.table_row] * (more + 1))
        made.next_rows.extend([-1] * more + [-1 if chunk.next_row is None else chunk.next_row])
    return made
