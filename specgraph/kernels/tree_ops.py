"""Launching the Triton kernels of draft trees."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specgraph.kernels import tree as kernels
from specgraph.kernels.attention_ops import cache_layout, unsupported
from specgraph.kernels.block_tree import block_tree_kernel
from specgraph.kernels.launch import Launcher, ceil_div, contiguous_rows, power_of_two
from specgraph.ops.kv_cache import bytes_of
from specgraph.ops.tree import Beams, Candidates, TreeNodes

_COLUMNS = 4096
"""Columns of logits per program."""
_MOST_MOVES = 1024


class TreeOps(Launcher):
    """Implementations of the ops in `specgraph.ops.tree`, and of `move_kv`."""

    __slots__ = ()

    def grow_tree(
        self, logits: Tensor, draft_to_target: Tensor | None, draft_step: Tensor, first: bool, candidates: Candidates,
        beams: Beams,
    ) -> None:  # fmt: skip
        requests, k = beams.scores.shape
        if requests == 0:
            return
        columns, number, drawn = logits.shape[1], candidates.scores.shape[1], k if first else k * k
        value, index, total = self._top_tokens(logits, k)
        blocks = total.shape[1]
        self.launch(
            kernels.grow_kernel, (requests,),
            value, index, total, draft_to_target, draft_step, *candidates, *beams, number, columns, blocks, FIRST=first,
            TOP_K=k, BEAMS=power_of_two(k), FOUND=power_of_two(blocks * k), BLOCKS=power_of_two(blocks),
            DRAWN=power_of_two(drawn), CANDIDATES=power_of_two(number), num_warps=1,
        )  # fmt: skip

    def draft_block_tree(self, logits: Tensor, draft_to_target: Tensor | None, top_k: int, tree: TreeNodes) -> None:
        requests, nodes = tree.token_ids.shape
        if requests == 0:
            return
        steps, columns = logits.shape[0] // requests, logits.shape[1]
        value, index, total = self._top_tokens(logits, top_k)
        blocks = total.shape[1]
        self.launch(
            block_tree_kernel, (requests,),
            value, index, total, draft_to_target, *tree, steps, nodes, columns, blocks, tree.token_ids.stride(0),
            tree.parents.stride(0), TOP_K=top_k, FOUND=power_of_two(blocks * top_k),
            BLOCKS=power_of_two(blocks), PLACES=power_of_two(steps * top_k), OPEN=power_of_two(2 * nodes + 1),
            NODES=power_of_two(nodes), num_warps=1,
        )  # fmt: skip

    def _top_tokens(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return what `scan_top_kernel` finds in each block of each row of logits [T, columns]: values [T, blocks,
        count], columns, and sums [T, blocks]."""
        logits = contiguous_rows(logits)
        rows, columns = logits.shape
        blocks = ceil_div(columns, _COLUMNS)
        value = logits.new_empty((rows, blocks, count), dtype=torch.float32)
        index = logits.new_empty((rows, blocks, count), dtype=torch.int32)
        total = logits.new_empty((rows, blocks), dtype=torch.float32)
        self.launch(
            kernels.scan_top_kernel, (rows, blocks),
            logits, value, index, total, columns, logits.stride(0), blocks, TOP_K=count, COLUMNS=_COLUMNS, num_warps=8,
        )  # fmt: skip
        return value, index, total

    def choose_nodes(self, candidates: Candidates, tree: TreeNodes) -> None:
        requests, nodes = tree.token_ids.shape
        if requests and nodes:
            number = candidates.scores.shape[1]
            self.launch(
                kernels.choose_kernel, (requests,),
                *candidates, torch.empty_like(candidates.parents), *tree, number, nodes, tree.token_ids.stride(0),
                tree.parents.stride(0), CANDIDATES=power_of_two(number), num_warps=4,
            )  # fmt: skip

    def advance_tree(
        self, base_lens: Tensor, base_positions: Tensor, block_table: Tensor, *, tree_len: int, max_model_len: int,
        block_size: int, seq_lens: Tensor, positions: Tensor, slot_mapping: Tensor, draft_step: Tensor,
    ) -> None:  # fmt: skip
        requests = base_lens.shape[0]
        self.launch(
            kernels.advance_tree_kernel, (1,),
            base_lens, base_positions, block_table, seq_lens, positions, slot_mapping, draft_step, requests,
            positions.shape[0] // max(requests, 1), tree_len, block_table.stride(0), block_table.shape[1],
            max_model_len, BLOCK=block_size, ROWS=power_of_two(positions.shape[0]), num_warps=4,
        )  # fmt: skip

    def move_kv(self, key_cache: Tensor, value_cache: Tensor, from_slots: Tensor, to_slots: Tensor) -> Any:
        key_cache, value_cache = bytes_of(key_cache), bytes_of(value_cache)
        moves, (heads, dim) = from_slots.shape[0], key_cache.shape[2:]
        if moves > _MOST_MOVES or unsupported(key_cache, value_cache):
            return NotImplemented
        if moves:
            part = 32 if moves <= 256 else 8
            self.launch(
                kernels.move_kernel, (heads, ceil_div(dim, part)),
                key_cache, value_cache, from_slots, to_slots, moves, **cache_layout(key_cache), DIM=dim, PART=part,
                MOVES=power_of_two(moves), num_warps=4,
            )  # fmt: skip
