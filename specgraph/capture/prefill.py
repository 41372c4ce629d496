"""Prefill passes: they write rows of one prompt to the KV cache, padded to a captured number of rows.

Target and drafter prefill alike. A pass is a uniform batch of one request. Padding follows the real rows and writes no
KV, so one graph serves every prefill chunk that fits, at any position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from specgraph.attention import NULL_BLOCK, AttentionMetadata
from specgraph.attention.metadata import allocate_metadata
from specgraph.attention.rows import PrefillRows
from specgraph.buffers import Axes, Buffers, Once, PerRow
from specgraph.capture.attend import MakeAttend
from specgraph.capture.dispatch import BatchDescriptor, Phase, padded_size
from specgraph.capture.model_runner import ModelRunner
from specgraph.capture.program import Program, Work
from specgraph.capture.transfers import write
from specgraph.config import DraftConfig
from specgraph.errors import CapacityError


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillBuffers(Buffers):
    """The persistent tensors of prefill passes of up to T rows, for one model."""

    inputs: Once
    """int64: the memory that first_position, num_rows, block_table and token_ids are views of. One copy writes them
    for each pass."""
    token_ids: Annotated[Tensor, Axes("tokens")]
    """int64 [T + look_ahead]: the tokens of the real rows, then the tokens that follow them in the prompt."""
    first_position: Once
    """int64 [1]: the position of row 0."""
    num_rows: Once
    """int64 [1]: the number of real rows. 0 makes the pass inert."""
    block_table: Once
    """int32 [1, blocks], filled up with NULL_BLOCK. It has room for T rows past max_model_len, and at least as many
    columns as the block table of a propose or a verify."""
    aux_hidden: PerRow
    """[T, aux_size]: the target's hidden states. The target's pass writes them, the drafter's pass reads them."""
    last_row: Once
    """int64 [1]: the last real row."""
    metadata: AttentionMetadata

    @property
    def look_ahead(self) -> int:
        """Return the number of tokens past the rows, which later modules of a drafter take. 0 without such modules."""
        return self.token_ids.shape[0] - self.aux_hidden.shape[0]

    def sliced(self, rows: int) -> PrefillBuffers:
        """Return views of the buffers for a pass of `rows` rows."""
        return self.views(1, rows=rows, tokens=rows + self.look_ahead)

    def load(
        self,
        token_ids: Sequence[int],
        first_position: int,
        blocks: Sequence[int],
        num_rows: int,
        following: Sequence[int] = (),
    ) -> None:
        """Write the inputs of a pass of `num_rows` rows, padding included, in place.

        Args:
            following: up to `look_ahead` tokens after the tokens of the rows. If fewer are known, the last one repeats.

        Raises:
            CapacityError: more blocks than the table holds.
        """
        width = self.block_table.shape[1]
        if len(blocks) > width:
            raise CapacityError(f"a prefill pass with {len(blocks)} KV blocks: its block table holds {width}")
        table = [*blocks, *[NULL_BLOCK] * (width - len(blocks))]
        if len(table) % 4:
            table += [0] * (4 - len(table) % 4)
        pairs = [low | high << 32 for low, high in zip(table[::2], table[1::2], strict=True)]
        tokens = [*token_ids, *following]
        tokens += tokens[-1:] * (len(token_ids) + self.look_ahead - len(tokens))
        padding = [0] * (num_rows + self.look_ahead - len(tokens))
        words = [first_position, 0, len(token_ids), 0, *pairs, *tokens, *padding]
        write(self.inputs[: len(words)], words)


def allocate_prefill(
    config: DraftConfig,
    aux_size: int,
    dtype: torch.dtype,
    device: torch.device,
    aux_hidden: Tensor | None = None,
    look_ahead: int = 0,
) -> PrefillBuffers:
    """Allocate inert buffers for passes of up to the largest prefill size.

    Args:
        aux_hidden: [rows, aux_size]: memory to share, such as a drafter's. None to allocate it.
        look_ahead: see `PrefillBuffers.look_ahead`.
    """
    rows = config.prefill_rows[-1]
    blocks = max(config.max_blocks, -(-(config.max_model_len + rows) // config.block_size))
    words = -(-blocks // 4) * 2  # compiled kernels expect pointers to multiples of 16 bytes: each part begins at one
    inputs = torch.zeros(4 + words + rows + look_ahead, dtype=torch.int64, device=device)
    table = inputs[4 : 4 + words].view(torch.int32)[:blocks].view(1, blocks)
    table.fill_(NULL_BLOCK)
    if aux_hidden is None:
        aux_hidden = torch.zeros(rows, aux_size, dtype=dtype, device=device)
    return PrefillBuffers(
        inputs=inputs,
        token_ids=inputs[4 + words :],
        first_position=inputs[0:1],
        num_rows=inputs[2:3],
        block_table=table,
        aux_hidden=aux_hidden,
        last_row=torch.zeros(1, dtype=torch.int64, device=device),
        metadata=allocate_metadata(1, config.prefill_rows, table),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillProgram(Program):
    """The prefill passes of one model."""

    buffers: PrefillBuffers
    config: DraftConfig
    forward: Callable[[PrefillBuffers, MakeAttend], None]
    """Runs the model. It is called when positions, slots and lengths are in the buffers."""
    num_passes: int = 1
    """The number of forward passes with attention in `forward`."""
    phase: Phase = "prefill"

    def num_steps(self, batch: BatchDescriptor) -> int:
        return self.num_passes

    def batches(self) -> list[BatchDescriptor]:
        return [BatchDescriptor("prefill", 1, rows, 0) for rows in reversed(self.config.prefill_rows)]

    def plan(self, batch: BatchDescriptor) -> PrefillRows:
        """Return the row plan of a padded pass. A row with a known token is real; the others are padding."""
        return PrefillRows.of(batch.query_len, self.config.limits)

    def work_of(self, batch: BatchDescriptor) -> Work:
        """Return the work of a pass: it fills positions, slots and lengths, then runs the model."""
        b = self.buffers.sliced(batch.query_len)

        def work(steps: Sequence[int], make_attend: MakeAttend) -> None:
            self.plan(batch).fill(b.first_position, b.block_table, b.num_rows, b.metadata.places, b.last_row)
            self.forward(b, make_attend)

        return work

    def make_inert(self) -> None:
        self.buffers.num_rows.zero_()

    def named_tensors(self) -> dict[str, Tensor]:
        return self.buffers.named_tensors("prefill")

    def dispatch(self, num_rows: int) -> BatchDescriptor:
        """Return the padded pass for `num_rows` rows of a prompt. Raises CapacityError if no pass has that many rows.

        Eager passes are padded too, since the last bit of a matmul depends on the number of rows.
        """
        size = padded_size(num_rows, self.config.prefill_rows)
        if size is None or num_rows < 1:
            raise CapacityError(
                f"a prefill pass of {num_rows} rows: passes have 1 to {self.config.prefill_rows[-1]}; cut the prompt "
                "into chunks"
            )
        return BatchDescriptor("prefill", 1, size, 0)

    def run(
        self,
        runner: ModelRunner,
        token_ids: Sequence[int],
        first_position: int,
        blocks: Sequence[int],
        at_least: int = 0,
        following: Sequence[int] = (),
    ) -> None:
        """Run a pass over consecutive rows of one prompt.

        Args:
            runner: the model's runner, which has this program.
            token_ids, first_position: the token of each row, and the position of the first row.
            blocks: the request's KV blocks, from position 0 on.
            at_least: the least number of rows to pad for. Without tokens the whole pass is padding.
            following: see `PrefillBuffers.load`.

        Raises:
            CapacityError: more rows than the longest pass has, or more tokens than `blocks` hold. Nothing was run.
        """
        batch = self.dispatch(max(len(token_ids), at_least))
        size, end = self.config.block_size, first_position + len(token_ids)
        if end > len(blocks) * size:
            raise CapacityError(
                f"a prefill pass up to position {end - 1} needs {-(-end // size)} KV blocks of {size} tokens, got "
                f"{len(blocks)}: give the request's blocks from position 0 on"
            )
        self.buffers.load(token_ids, first_position, blocks, batch.query_len, following)
        starts = [first_position][: len(token_ids)]
        runner.run(runner.prepare(self, batch), lambda step: self.plan(batch).host_lengths(starts, 1))
