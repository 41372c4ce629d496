"""Attention metadata: lengths, slots, positions and block tables of the rows of one pass."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

import torch
from torch import Tensor

from specgraph import ops
from specgraph.attention.rows import Places
from specgraph.buffers import ONCE, VIEW, Buffers, PerRequest, PerRow
from specgraph.errors import ConfigError
from specgraph.ops.slots import NULL_BLOCK, NULL_SLOT


@dataclass(frozen=True, slots=True)
class AttentionMetadata(Buffers):
    """Metadata of one pass over R requests and T = R * query_len rows, all on the device.

    Rows are ordered by request: request r owns rows `query_start_loc[r] : query_start_loc[r + 1]`.
    """

    query_start_loc: Annotated[Tensor, VIEW]
    """int32 [R + 1]"""
    seq_lens: PerRequest
    """int32 [R]: the number of keys that the last row of each request sees, its own included. 0 for inert requests."""
    positions: PerRow
    """int64 [T]: the rotary position of each row, never above max_model_len - 1."""
    slot_mapping: PerRow
    """int64 [T]: the slot of each row's key and value, block * block_size + offset. NULL_SLOT writes nothing."""
    block_table: PerRequest
    """int32 [R, max_blocks]: the blocks of each request in order, filled up with NULL_BLOCK."""
    query_len: int
    """Rows per request in a uniform batch; the most rows of any request in a ragged one."""
    ancestors: PerRow | None = None
    """int64 [T]: a word of bits per row of a draft tree. A row sees the first seq_len - tree_len keys. It sees key
    seq_len - tree_len + i if bit i of its word is set. None if the rows are no nodes of a tree. Rows of trees need a
    uniform batch, and not every backend can run them."""
    tree_len: int = 0
    """The number of keys at the end of each request that the bits of `ancestors` stand for: at most 64."""
    start_locs: Annotated[Mapping[int, Tensor], ONCE] = field(default_factory=dict[int, Tensor])
    """The constant `query_start_loc` of the largest batch, for each number of rows per request that `views` can make.
    Empty if no views are made."""

    @property
    def num_requests(self) -> int:
        """R, padding included."""
        return self.seq_lens.shape[0]

    @property
    def places(self) -> Places:
        """The tensors that place the rows: positions, slots and lengths."""
        return Places(positions=self.positions, slot_mapping=self.slot_mapping, seq_lens=self.seq_lens)

    @property
    def lengths(self) -> ops.DeviceLengths:
        """Return the numbers of rows and keys of each request, as attention ops take them."""
        return ops.DeviceLengths(self.seq_lens, self.query_start_loc, self.query_len)

    def views(self, num_requests: int, **sizes: int) -> AttentionMetadata:
        """Return views of the first `num_requests` requests of a uniform batch.

        sizes: only `rows`, the rows per request: one of the numbers that `allocate_metadata` got.
        """
        rows = sizes["rows"]
        if rows not in self.start_locs:
            known = ", ".join(map(str, self.start_locs)) or "none"
            raise ConfigError(f"metadata of {rows} rows per request; it was allocated for {known}")
        views = super(AttentionMetadata, self).views(num_requests, **sizes)
        return replace(views, query_start_loc=self.start_locs[rows][: num_requests + 1], query_len=rows)


def allocate_metadata(
    max_requests: int, query_lens: Collection[int], block_table: Tensor, tree_len: int = 0
) -> AttentionMetadata:
    """Allocate metadata for uniform batches of up to `max_requests` requests, all inert (length 0, NULL_SLOT).

    Args:
        query_lens: the numbers of rows per request that batches may have. The result has the largest.
        block_table: int32 [max_requests, max_blocks]; used without a copy.
        tree_len: see `AttentionMetadata.tree_len`; above 0 only for rows of draft trees.
    """
    query_len, device = max(query_lens), block_table.device
    rows = max_requests * query_len
    start_locs = {
        length: torch.arange(0, max_requests * length + 1, length, dtype=torch.int32, device=device)
        for length in sorted(query_lens)
    }
    return AttentionMetadata(
        query_start_loc=start_locs[query_len],
        seq_lens=torch.zeros(max_requests, dtype=torch.int32, device=device),
        positions=torch.zeros(rows, dtype=torch.int64, device=device),
        slot_mapping=torch.full((rows,), NULL_SLOT, dtype=torch.int64, device=device),
        block_table=block_table,
        query_len=query_len,
        ancestors=torch.zeros(rows, dtype=torch.int64, device=device) if tree_len else None,
        tree_len=tree_len,
        start_locs=start_locs,
    )


def allocate_block_table(max_requests: int, max_blocks: int, device: torch.device) -> Tensor:
    """Return a block table, int32 [max_requests, max_blocks], with NULL_BLOCK everywhere."""
    return torch.full((max_requests, max_blocks), NULL_BLOCK, dtype=torch.int32, device=device)
