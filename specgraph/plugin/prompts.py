"""The rows of prompts in an engine's pass, written into the drafter's KV cache by captured graphs.

The rows of a prompt are cut into segments of SEGMENT rows, and each segment is a request of a uniform batch. So the ops
and kernels of a target's round serve prompts of any lengths side by side, and a graph depends on the number of segments
alone. The keys of all segments are stored before any of them attends, and later passes see those of earlier ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from specgraph import ops
from specgraph.attention.metadata import AttentionMetadata, allocate_block_table, allocate_metadata
from specgraph.capture import BatchDescriptor, MakeAttend, ModelRunner, Phase, Program, Work, padded_size
from specgraph.capture.transfers import write
from specgraph.draft.buffers import PromptRows
from specgraph.draft.program import DraftProgram
from specgraph.ops.begin_rows import RowInputs, RowPlan, Rows

SEGMENT = 16
"""Rows of a segment; the last one of a chunk may have fewer."""

SIZES = (8, 32, 64, 128)
"""Segments of the captured passes: few, because each size has kernels to compile at start-up. A pass of an engine with
more rows becomes several."""


NumberT = TypeVar("NumberT", int, Tensor)


class Chunk(NamedTuple):
    """Consecutive rows of one prompt in an engine's pass, as the host knows them."""

    request: int
    """The number of the request in the batch."""
    first_row: int
    num_rows: int
    position: int
    """The place of the first row in its prompt."""


class Segment(NamedTuple, Generic[NumberT]):
    """Up to SEGMENT rows of a chunk; on the device N segments, int64 [N] each."""

    request: NumberT
    first_row: NumberT
    num_rows: NumberT
    position: NumberT
    last_column: NumberT
    """The column of the chunk's last row; -1 where the chunk goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPass:
    """The tensors of an engine's pass over T rows of n requests, some of which are in their prompts."""

    chunks: Sequence[Chunk]
    token_ids: Tensor
    """integer [>= T]: the token of each row."""
    next_tokens: Tensor
    """integer [n]: the token after each chunk: the prompt's next one, or the one that the target sampled."""
    hidden_states: Sequence[Tensor]
    """[>= T, size] each: those that the drafter takes of the target, side by side."""
    table: Tensor
    """See `RoundEnd.table`, as the two that follow."""
    table_of_slots: bool = False
    table_rows: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentBuffers:
    """The persistent tensors of passes over up to N segments."""

    segments: Tensor
    """int64 [5, N]: the numbers of `Segment`s."""
    token_ids: Tensor
    """int64 [N * SEGMENT]: what each row takes."""
    aux_hidden: Tensor
    """[N * SEGMENT, aux_size]"""
    metadata: AttentionMetadata

    def sliced(self, size: int) -> SegmentBuffers:
        rows = size * SEGMENT
        return SegmentBuffers(
            segments=self.segments[:, :size],
            token_ids=self.token_ids[:rows],
            aux_hidden=self.aux_hidden[:rows],
            metadata=self.metadata.sliced(size),
        )


class PromptProgram(Program):
    """Writes the drafter's KV of prompt rows."""

    phase: Phase = "prefill"

    def __init__(self, program: DraftProgram[Any], max_num_rows: int) -> None:
        """
        Args:
            program: a draft program of the head.
            max_num_rows: of an engine's pass; no pass here has more, unless it is one segment.
        """
        head, config, device = program.head, program.config, program.buffers.round.seeds.device
        most = min(max(max_num_rows // SEGMENT, 1), SIZES[-1])
        self.sizes = (*(size for size in SIZES if size < most), most)
        self._program, self._block_size = program, config.block_size
        self._plan = RowPlan(SEGMENT, *config.limits)
        n, rows = self.sizes[-1], self.sizes[-1] * SEGMENT
        table = allocate_block_table(n, -(-(config.max_model_len + SEGMENT) // config.block_size), device)
        self.buffers = SegmentBuffers(
            segments=torch.zeros(len(Segment._fields), n + n % 2, dtype=torch.int64, device=device),  # rows of 16 bytes
            token_ids=torch.zeros(rows, dtype=torch.int64, device=device),
            aux_hidden=torch.zeros(rows, head.aux_size, dtype=head.dtype, device=device),
            metadata=allocate_metadata(n, [SEGMENT], table),
        )
        self._column = torch.arange(SEGMENT, device=device)
        self._block_starts = torch.arange(0, table.shape[1] * config.block_size, config.block_size, device=device)
        self._first_row = torch.zeros(1, dtype=torch.int64, device=device)

    def num_steps(self, batch: BatchDescriptor) -> int:
        return self._program.prefill_passes

    def batches(self) -> list[BatchDescriptor]:
        return [BatchDescriptor("prefill", size, SEGMENT, 0) for size in reversed(self.sizes)]

    def work_of(self, batch: BatchDescriptor) -> Work:
        """Return the work: positions, slots and lengths of the rows; then the head."""
        b = self.buffers.sliced(batch.num_requests)

        def work(steps: Sequence[int], make_attend: MakeAttend) -> None:
            at, now = b.metadata, Segment(*b.segments)
            given = RowInputs(now.position, at.block_table, now.num_rows)
            ops.begin_rows(given, self._plan, Rows(at.positions, at.slot_mapping, at.seq_lens))
            # Nobody reads the head's output: it computes that of one row.
            self._program.prefill(PromptRows(b.token_ids, b.aux_hidden, at, self._first_row), make_attend)

        return work

    def make_inert(self) -> None:
        self.buffers.segments.zero_()

    def named_tensors(self) -> Mapping[str, Tensor]:
        b = self.buffers
        own = {"segments": b.segments, "token_ids": b.token_ids, "aux_hidden": b.aux_hidden, "row": self._first_row}
        named = {f"prompts.{name}": tensor for name, tensor in own.items()}
        return named | b.metadata.named_tensors("prompts.metadata")

    def run(self, runner: ModelRunner, given: PromptPass) -> None:
        """Write the rows of all chunks, in one pass or in several; this is one of the runner's programs."""
        segments = [segment for chunk in given.chunks for segment in segments_of(chunk)]
        for first in range(0, len(segments), self.sizes[-1]):
            part = segments[first : first + self.sizes[-1]]
            size = padded_size(len(part), self.sizes)
            assert size is not None
            self._load(given, part, self.buffers.sliced(size))
            runner.run(runner.prepare(self, BatchDescriptor("prefill", size, SEGMENT, 0)))

    def _load(self, given: PromptPass, part: Sequence[Segment[int]], into: SegmentBuffers) -> None:
        """Bring segments, their tokens, hidden states and blocks to where the graph reads them."""
        padding = [0] * (into.segments.shape[1] - len(part))
        write(into.segments, [[*numbers, *padding] for numbers in zip(*part, strict=True)])
        now = Segment(*into.segments)
        rows = now.first_row[:, None] + self._column
        # A chunk's last row, whose token is another one, may be the engine's last; those behind it are never read.
        following = (rows if self._program.position_offset else rows + 1).clamp_(max=given.token_ids.shape[0] - 1)
        tokens = given.token_ids[following]
        if not self._program.position_offset:
            ends = given.next_tokens[now.request].to(tokens.dtype)[:, None]
            tokens = torch.where(self._column == now.last_column[:, None], ends, tokens)
        held = self._column < now.num_rows[:, None]
        torch.mul(tokens, held, out=into.token_ids.view(held.shape))
        size, rows = 0, rows.flatten()
        for states in given.hidden_states if into.aux_hidden.shape[1] else ():
            columns = into.aux_hidden[:, size : size + states.shape[1]]
            torch.index_select(states, 0, rows.clamp_(max=states.shape[0] - 1), out=columns)
            size += states.shape[1]
        step, table = self._block_size if given.table_of_slots else 1, into.metadata.block_table
        width = -(-(max(segment.position for segment in part) + SEGMENT) // self._block_size)
        entries = given.table[:, : width * step : step]
        entries = entries[now.request if given.table_rows is None else given.table_rows.long()[now.request]]
        owned = self._block_starts[: entries.shape[1]] < (now.position + now.num_rows)[:, None]
        # No row of a prompt sees a block further on: those of an earlier pass stand there.
        torch.mul(entries // step if step > 1 else entries, owned, out=table[:, : entries.shape[1]])


def segments_of(chunk: Chunk) -> Iterator[Segment[int]]:
    """Yield the segments of a chunk, in order."""
    for done in range(0, chunk.num_rows, SEGMENT):
        left = chunk.num_rows - done
        last = left - 1 if left <= SEGMENT else -1
        yield Segment(chunk.request, chunk.first_row + done, min(left, SEGMENT), chunk.position + done, last)
