"""Writes the keys and values of prompt rows in a host engine's pass into the drafter's KV cache, by captured graphs.

The rows of a prompt are cut into segments of SEGMENT rows, and each segment is a request of a uniform batch. So the ops
and kernels of a verify also serve prompts of different lengths side by side, and a graph depends on the number of
segments alone. The keys of all segments are stored before any segment attends. Later passes see the keys of earlier
ones.
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
"""Rows of a segment. The last segment of a prompt chunk may have fewer."""

SIZES = (8, 32, 64, 128)
"""Segments of the captured passes. There are few sizes, because each has kernels to compile at start-up. A host
engine's pass with more rows is split into several passes."""


class PromptChunk(NamedTuple):
    """Consecutive rows of one prompt in a host engine's pass, as numbers on the host."""

    first_row: int
    num_rows: int
    position: int
    """The position of the first row in its prompt."""
    table_row: int
    """The row of the request in `PromptPass.table`."""
    next_row: int | None
    """The index in `PromptPass.next_tokens` of the token after the chunk. None if the prompt ends with the chunk and
    its last row is the request's row in the `VerifyOutput` of the same pass (`first_rows`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPass:
    """The tensors of a host engine's pass over T rows, with the chunks of prompts among the rows."""

    chunks: Sequence[PromptChunk]
    token_ids: Tensor
    """integer [>= T]: the token of each row."""
    next_tokens: Tensor
    """integer: the token after each chunk, which is the prompt's next token or the token that the target sampled."""
    hidden_states: Sequence[Tensor]
    """[>= T, size] each: the target's hidden states that the drafter concatenates."""
    table: Tensor
    """See `VerifyOutput.table`."""
    table_of_slots: bool = False


class Segments(NamedTuple):
    """The numbers of N segments: each field is a list of N on the host, or int64 [N] on the device."""

    first_rows: Any
    num_rows: Any
    positions: Any
    table_rows: Any
    next_rows: Any
    """The index in `PromptPass.next_tokens` of the token after the segment. -1 if it is the next row's token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentBuffers(Buffers):
    """The persistent tensors of passes over up to N segments."""

    segments: Annotated[Tensor, Axes("numbers")]
    """int64 [5 * N]: the fields of `Segments` one after the other, N numbers each for a pass of N segments."""
    inputs: ProposeBatch
    """The segments as requests of SEGMENT rows each."""
    metadata: AttentionMetadata

    def sliced(self, size: int) -> SegmentBuffers:
        return self.views(size, rows=SEGMENT, numbers=len(Segments._fields))


class PromptProgram(Program):
    """Writes the keys and values of prompt rows into the drafter's KV cache."""

    phase: Phase = "prefill"

    def __init__(self, program: DraftProgram[Any, Any], max_num_rows: int) -> None:
        """
        Args:
            program: a draft program of the head.
            max_num_rows: the most rows of a host engine's pass. No captured pass has more, unless it is one segment.
        """
        head, config, device = program.head, program.config, program.buffers.shared.seeds.device
        most = max(min(max_num_rows // SEGMENT, SIZES[-1]) // 2 * 2, 1)  # even: aligns each of `Segments`
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
        """Return the device work: the rows' positions, slots and lengths, then the head."""
        b, plan = self._by_size[batch.num_requests], PrefillRows.of(SEGMENT, self._limits)

        def work(steps: Sequence[int], make_attend: MakeAttend) -> None:
            at, rows = b.metadata, b.inputs
            plan.fill(rows.start_positions, at.block_table, rows.num_sampled, at.places)
            # The head's output is not read, so it is computed for one row only.
            prompts = PromptRows(rows.sampled_token_ids.view(-1), rows.aux_hidden, at, self._first_row)
            self._program.prefill(prompts, make_attend)

        return work

    def make_inert(self) -> None:
        self.buffers.inputs.num_sampled.zero_()

    def named_tensors(self) -> Mapping[str, Tensor]:
        return {**self.buffers.named_tensors("prompts"), "prompts.row": self._first_row}

    def run(self, runner: ModelRunner, given: PromptPass) -> None:
        """Write the rows of all chunks, in one pass or in several.

        Args:
            runner: the drafter, which has this program.
        """
        # The propose after a prompt's end writes the prompt's last row, unless keys lie at their own token's position.
        segments = segments_of(given.chunks, writes_ends=bool(self._program.position_offset))
        for first in range(0, len(segments.first_rows), self.sizes[-1]):
            part = Segments(*(numbers[first : first + self.sizes[-1]] for numbers in segments))
            size = padded_size(len(part.first_rows), self.sizes)
            assert size is not None
            self._load(given, part, self._by_size[size])
            lengths = PrefillRows.of(SEGMENT, self._limits).host_lengths(part.positions, size)
            runner.run(
                runner.prepare(self, BatchDescriptor("prefill", size, SEGMENT, 0)), lambda step, now=lengths: now
            )

    def _load(self, given: PromptPass, part: Segments, into: SegmentBuffers) -> None:
        """Copy segments, with their tokens, hidden states and blocks, into the graph's buffers."""
        n, size = len(part.first_rows), into.metadata.num_requests
        padding = [0] * (size - n)
        write(into.segments, [number for numbers in part for number in (*numbers, *padding)])
        now = Segments(*into.segments.view(-1, size)[:, :n])
        takes_own_tokens = bool(self._program.position_offset)
        output = VerifyOutput(
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
        # No row of this part reads a later column, so stale blocks of an earlier pass may stay there.
        columns = _whole(-(-(max(part.positions) + SEGMENT) // block_size))
        inputs = replace(into.inputs, block_table=into.inputs.block_table[:, :columns])
        fill_batch(output, inputs, max_model_len, block_size, 0)


def _whole(columns: int) -> int:
    """Round a number of columns up to a multiple of 16: start-up compiles `fill_batch`'s kernel for such numbers."""
    return -(-columns // 16) * 16


def segments_of(chunks: Sequence[PromptChunk], writes_ends: bool) -> Segments:
    """Cut chunks into segments, in order.

    Args:
        writes_ends: True if a chunk without `next_row` has its last row in a segment too.
    """
    made = Segments([], [], [], [], [])
    for chunk in chunks:
        rows = chunk.num_rows - (chunk.next_row is None and not writes_ends)
        more = -(-rows // SEGMENT) - 1  # segments before the last one
        if more < 0:
            continue
        made.first_rows.extend(range(chunk.first_row, chunk.first_row + rows, SEGMENT))
        made.num_rows.extend([SEGMENT] * more + [rows - more * SEGMENT])
        made.positions.extend(range(chunk.position, chunk.position + rows, SEGMENT))
        made.table_rows.extend([chunk.table_row] * (more + 1))
        made.next_rows.extend([-1] * more + [-1 if chunk.next_row is None else chunk.next_row])
    return made
