"""A prompt's rows on their way into the KV cache: one request a pass, padded to a captured number of rows.

Target and drafter both prefill so. The rows of a pass are a uniform batch of one request, whose padding stands after
the real rows and writes nothing; so one graph serves every prompt of up to that many rows, at any position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from specgraph import kernels
from specgraph.attention import NULL_BLOCK, AttentionMetadata, HostLengths, allocate_block_table, allocate_metadata
from specgraph.drafting.config import DraftConfig
from specgraph.drafting.transfers import write
from specgraph.errors import CapacityError
from specgraph.graphs import BatchDescriptor, padded_size


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBuffers:
    """The persistent tensors of prompt passes of up to T rows, for one model. All but the last are written per pass."""

    token_ids: Tensor
    """int64 [T]"""
    first_position: Tensor
    """int64 [1]: position of row 0."""
    num_rows: Tensor
    """int64 [1]: real rows; 0 makes a pass inert."""
    block_table: Tensor
    """int32 [1, blocks]: room for T rows past max_model_len, filled up with NULL_BLOCK."""
    aux_hidden: Tensor
    """[T, aux_size]: the target's hidden states; written by the target's pass, read by the drafter's."""
    last_row: Tensor
    """int64 [1]: the last real row."""
    metadata: AttentionMetadata
    query_start_locs: Mapping[int, Tensor]
    """int32 [2] for each captured number of rows: constants."""

    def named_tensors(self) -> dict[str, Tensor]:
        """Every tensor by name, for the read-set."""
        own = {f"prompt.{f.name}": v for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)}
        starts = {f"prompt.query_start_loc.{rows}": tensor for rows, tensor in self.query_start_locs.items()}
        return {**own, **starts, **self.metadata.named_tensors("prompt.metadata")}

    def sliced(self, rows: int) -> PromptBuffers:
        """A pass of `rows` rows: views of the same memory."""
        whole = replace(self.metadata, query_start_loc=self.query_start_locs[rows], query_len=rows)
        return replace(
            self, token_ids=self.token_ids[:rows], aux_hidden=self.aux_hidden[:rows], metadata=whole.sliced(1)
        )

    def begin(self, max_model_len: int, block_size: int) -> None:
        """The pass's first node: positions, slots and lengths of its rows."""
        kernels.begin_prefill(
            self.first_position,
            self.num_rows,
            self.block_table,
            max_model_len=max_model_len,
            block_size=block_size,
            positions=self.metadata.positions,
            slot_mapping=self.metadata.slot_mapping,
            seq_lens=self.metadata.seq_lens,
            last_row=self.last_row,
        )

    def load(self, token_ids: Sequence[int], first_position: int, blocks: Sequence[int]) -> None:
        """Write one pass's rows, in place."""
        count, width = len(token_ids), self.block_table.shape[1]
        row = [*blocks, *[NULL_BLOCK] * (width - len(blocks))]
        write(self.token_ids[:count], token_ids)
        self.token_ids[count:].zero_()
        self.first_position.fill_(first_position)
        self.num_rows.fill_(count)
        write(self.block_table, [row])


def allocate_prompt(
    config: DraftConfig, aux_size: int, dtype: torch.dtype, device: torch.device, aux_hidden: Tensor | None = None
) -> PromptBuffers:
    """Buffers for passes of up to the largest prompt size, inert; `aux_hidden` where it is shared."""
    rows = config.prompt_sizes[-1]
    table = allocate_block_table(1, -(-(config.max_model_len + rows) // config.block_size), device)
    one = torch.zeros(1, dtype=torch.int64, device=device)
    if aux_hidden is None:
        aux_hidden = torch.zeros(rows, aux_size, dtype=dtype, device=device)
    return PromptBuffers(
        token_ids=torch.zeros(rows, dtype=torch.int64, device=device),
        first_position=one,
        num_rows=one.clone(),
        block_table=table,
        aux_hidden=aux_hidden,
        last_row=one.clone(),
        metadata=allocate_metadata(1, rows, table),
        query_start_locs={n: torch.tensor([0, n], dtype=torch.int32, device=device) for n in config.prompt_sizes},
    )


def prompt_descriptor(num_rows: int, sizes: Sequence[int]) -> BatchDescriptor:
    """The padded pass for `num_rows` rows of a prompt.

    Raises:
        CapacityError: more rows than the longest pass has; the caller cuts prompts into chunks.
    """
    size = padded_size(num_rows, sizes)
    if size is None or num_rows < 1:
        raise CapacityError(
            f"a prompt pass of {num_rows} rows: passes have 1 to {sizes[-1]}; cut the prompt into chunks"
        )
    return BatchDescriptor("prefill", 1, size, 0)


def prompt_lengths(first_position: int, rows: int) -> HostLengths:
    """Host lengths of a pass of `rows` rows, padding included: the same numbers as the device metadata has."""
    return HostLengths([rows], [first_position + rows])


def prompt_metadata(
    first_position: int, count: int, blocks: Sequence[int], config: DraftConfig, device: torch.device
) -> AttentionMetadata:
    """Metadata of `count` consecutive rows of one request, unpadded, for an eager pass of one's own."""
    size = config.block_size
    positions = range(first_position, first_position + count)
    slots = [blocks[position // size] * size + position % size for position in positions]
    return AttentionMetadata(
        query_start_loc=torch.tensor([0, count], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([first_position + count], dtype=torch.int32, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
        block_table=torch.tensor([list(blocks)], dtype=torch.int32, device=device),
        query_len=count,
    )
