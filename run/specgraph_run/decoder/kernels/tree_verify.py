"""The kernels that accept a path of a draft tree, and move its keys and values."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportReturnType=false
# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.kv_cache import cache_layout, unsupported
from specgraph.kernels.launch import Launcher, ceil_div, contiguous_rows, power_of_two
from specgraph.kernels.noise import noise_key, uniform
from specgraph.ops.kv_cache import bytes_of
from specgraph.ops.tree import TreeNodes
from specgraph_run.decoder.kernels.verify import require_rows
from specgraph_run.decoder.ops.rejection import Acceptance, Sampled
from specgraph_run.decoder.ops.tree_verify import AcceptedPath, own_tokens

_MOST_MOVES = 1024


@triton.jit
def path_kernel(
    chosen, draft_token_ids, draft_parents, chances, seeds, start_positions, slot_mapping, sampled_token_ids,
    num_sampled, path_rows, from_slots, to_slots, rows, steps, drafts_stride, parents_stride, sampled_stride,
    ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write the accepted path of one request, its tokens, and the moves of its keys and values.

    chosen: int64 [R, rows], the target's own token after each row. With `chances`, place i + 1 of the path is row
    rows - steps + i, and is accepted with probability chances[i].
    """
    if OVERLAP is not None:
        OVERLAP()
    request = tl.program_id(0)
    start = tl.load(start_positions + request)
    live = start >= 0
    node = tl.arange(0, ROWS)
    known = node < rows - 1
    draft = tl.load(draft_token_ids + request * drafts_stride + node, mask=known, other=-1)
    parent = tl.full((ROWS,), -1, tl.int64)
    if chances is None:
        parent = tl.load(draft_parents + request * parents_stride + node, mask=known, other=-1)
    row = start * 0
    accepted = start * 0
    going = live
    for place in range(steps + 1):
        own = tl.load(chosen + request * rows + row)
        going_on = going
        following = row
        token = own
        if place < steps:
            if chances is not None:
                following = row * 0 + rows - steps + place
                number = uniform(noise_key(tl.load(seeds + request), tl.maximum(start, 0) + 1 + place, 2), row * 0)
                going_on = going & (number < tl.load(chances + place))
            else:
                match = known & (parent == row) & (draft == own)
                following = tl.min(tl.where(match, node, ROWS), axis=0).to(tl.int64) + 1
                going_on = going & (following <= ROWS)
            next_token = tl.sum(tl.where(node == following - 1, draft, 0), axis=0)
            token = tl.where(going_on, next_token, own)
        else:
            going_on = going & (place < 0)
        tl.store(sampled_token_ids + request * sampled_stride + place, tl.where(going, token, -1))
        tl.store(path_rows + request * (steps + 1) + place, request * rows + row)
        if place > 0:
            source = tl.load(slot_mapping + request * rows + row)
            target = tl.load(slot_mapping + request * rows + place)
            moved = (place <= accepted) & (source >= 0) & (target >= 0)
            to = request * steps + place - 1
            tl.store(from_slots + to, tl.where(moved, source, 0))
            tl.store(to_slots + to, tl.where(moved, target, 0))
        accepted += going_on.to(tl.int64)
        going = going_on
        row = following if chances is not None else tl.where(going_on, following, row)
    tl.store(num_sampled + request, tl.where(live, accepted + 1, 0).to(tl.int32))


@triton.jit
def move_kernel(
    key_cache, value_cache, from_slots, to_slots, moves, BLOCK: tl.constexpr, BLOCK_STRIDE: tl.constexpr,
    KEY_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr, DIM: tl.constexpr, PART: tl.constexpr, MOVES: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program per KV head and PART of its elements. It reads them for all moves, then writes them."""
    if OVERLAP is not None:
        OVERLAP()
    move = tl.arange(0, MOVES)
    source = tl.load(from_slots + move, mask=move < moves, other=0)
    target = tl.load(to_slots + move, mask=move < moves, other=0)
    element = tl.program_id(1) * PART + tl.arange(0, PART)
    wanted = ((move < moves) & (source != target))[:, None] & (element < DIM)[None, :]
    inside = tl.program_id(0) * HEAD_STRIDE + element
    source = (source // BLOCK * BLOCK_STRIDE + source % BLOCK * KEY_STRIDE)[:, None] + inside[None, :]
    target = (target // BLOCK * BLOCK_STRIDE + target % BLOCK * KEY_STRIDE)[:, None] + inside[None, :]
    key = tl.load(key_cache + source, mask=wanted)
    value = tl.load(value_cache + source, mask=wanted)
    tl.debug_barrier()
    tl.store(key_cache + target, key, mask=wanted)
    tl.store(value_cache + target, value, mask=wanted)


class VerifyTreeOps(Launcher):
    """The implementations of `verify_tree` and `move_kv`."""

    __slots__ = ()

    def verify_tree(
        self, target_logits: Tensor, tree: TreeNodes, start_positions: Tensor, positions: Tensor, slot_mapping: Tensor,
        acceptance: Acceptance, sampled: Sampled, path: AcceptedPath,
    ) -> None:  # fmt: skip
        requests, depth = sampled.token_ids.shape
        if requests == 0:
            return
        require_rows(sampled)
        chosen = own_tokens(target_logits, acceptance, positions)
        drafts, parents = (contiguous_rows(part) for part in tree)
        rows = drafts.shape[1] + 1
        self.launch(
            path_kernel, (requests,),
            chosen, drafts, parents, acceptance.chances, acceptance.seeds, start_positions.contiguous(), slot_mapping,
            *sampled, *path, rows, depth - 1, drafts.stride(0), parents.stride(0), sampled.token_ids.stride(0),
            ROWS=power_of_two(rows), num_warps=1,
        )  # fmt: skip

    def move_kv(self, key_cache: Tensor, value_cache: Tensor, from_slots: Tensor, to_slots: Tensor) -> None:
        key_cache, value_cache = bytes_of(key_cache), bytes_of(value_cache)
        moves, (heads, dim) = from_slots.shape[0], key_cache.shape[2:]
        if moves > _MOST_MOVES or unsupported(key_cache, value_cache):
            return NotImplemented
        if moves:
            part = 32 if moves <= 256 else 8
            self.launch(
                move_kernel, (heads, ceil_div(dim, part)),
                key_cache, value_cache, from_slots, to_slots, moves, **cache_layout(key_cache), DIM=dim, PART=part,
                MOVES=power_of_two(moves), num_warps=4,
            )  # fmt: skip
