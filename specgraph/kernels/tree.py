"""Kernels that draw a draft tree: the k best tokens of each row, the rows of the next level, and the nodes to verify.

One program decides everything for one request, and treats ties as `specgraph.ops.tree` states. It reads nothing of
other requests.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.begin_rows import slots_of
from specgraph.kernels.launch import Launcher, ceil_div, contiguous_rows, power_of_two
from specgraph.kernels.noise import best_of, real_numbers
from specgraph.ops.tree import Beams, Candidates, TreeNodes

_COLUMNS = 4096
"""Columns of logits per program."""


@triton.jit
def scan_top_kernel(
    logits, best_value, best_index, totals, columns, stride, blocks, TOP_K: tl.constexpr, COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Find the TOP_K best logits and their columns in each row's blocks of COLUMNS, and the sums of exp(logit - best).

    One program per row and block. Among equals the lower column comes first.
    """
    if OVERLAP is not None:
        OVERLAP()
    block = tl.program_id(1)
    row = tl.program_id(0)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    at = logits + row.to(tl.int64) * stride + column
    scores = real_numbers(tl.load(at, mask=inside, other=float("-inf")).to(tl.float32), inside)[None, :]
    part = row * blocks + block + tl.arange(0, 1)
    value, index = best_of(scores)
    base = tl.where(value == float("-inf"), 0.0, value)
    tl.store(totals + part, tl.sum(tl.exp(scores - base[:, None]), axis=1))
    for j in tl.static_range(TOP_K):
        tl.store(best_value + part * TOP_K + j, value)
        tl.store(best_index + part * TOP_K + j, block * COLUMNS + index)
        scores = tl.where(tl.arange(0, COLUMNS)[None, :] == index[:, None], float("-inf"), scores)
        value, index = best_of(scores)


@triton.jit
def found_in_row(
    best_value, best_index, totals, row, blocks, TOP_K: tl.constexpr, FOUND: tl.constexpr, BLOCKS: tl.constexpr
):
    """Load the results of `scan_top_kernel` for one row: values and columns [FOUND], and the row's log-sum-exp."""
    found = tl.arange(0, FOUND)
    block = tl.arange(0, BLOCKS)
    value = tl.load(best_value + row * blocks * TOP_K + found, mask=found < blocks * TOP_K, other=float("-inf"))
    index = tl.load(best_index + row * blocks * TOP_K + found, mask=found < blocks * TOP_K, other=2147483647)
    tops = tl.load(best_value + (row * blocks + block) * TOP_K, mask=block < blocks, other=float("-inf"))
    sums = tl.load(totals + row * blocks + block, mask=block < blocks, other=0.0)
    base = tl.max(tops, axis=0)
    base = tl.where(base == float("-inf"), 0.0, base)
    return value, index, base + tl.log(tl.sum(tl.exp(tops - base) * sums, axis=0))


@triton.jit
def take_best(value, index, draft_to_target, columns):
    """Remove the largest value, of equals the lowest column. Return the rest, the value and its target id."""
    best = tl.max(value, axis=0)
    token = tl.min(tl.where(value == best, index, 2147483647), axis=0)
    value = tl.where(index == token, float("-inf"), value)
    index = tl.where(index == token, 2147483647, index)
    token = tl.minimum(token, columns - 1).to(tl.int64)
    if draft_to_target is not None:
        token += tl.load(draft_to_target + token)
    return value, index, best, token


@triton.jit
def grow_kernel(
    best_value, best_index, totals, draft_to_target, draft_step, node_scores, node_token_ids, node_parents,
    beam_scores, beam_nodes, beam_rows, token_ids, ancestors, candidates, columns, blocks,
    FIRST: tl.constexpr, TOP_K: tl.constexpr, BEAMS: tl.constexpr, FOUND: tl.constexpr, BLOCKS: tl.constexpr,
    DRAWN: tl.constexpr, CANDIDATES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write one request's candidates of a draft step, from the results of `scan_top_kernel`, and the next one's rows.

    BEAMS, FOUND, BLOCKS, DRAWN and CANDIDATES are powers of two that hold TOP_K, blocks * TOP_K, blocks, the number of
    candidates of one draft step, and of all draft steps.
    """
    if OVERLAP is not None:
        OVERLAP()
    request = tl.program_id(0)
    step = tl.load(draft_step)
    beam = tl.arange(0, BEAMS)
    own = request * TOP_K + beam
    known = beam < TOP_K
    rows = 1
    number = step * 0
    if not FIRST:
        rows = TOP_K
        number = TOP_K + (step - 1) * TOP_K * TOP_K
    old_scores = tl.load(beam_scores + own, mask=known, other=0.0)
    old_nodes = tl.load(beam_nodes + own, mask=known, other=-1)
    old_bits = tl.load(ancestors + own, mask=known, other=0)
    if FIRST:
        every = tl.arange(0, CANDIDATES)
        nothing = tl.full((CANDIDATES,), float("-inf"), tl.float32)
        tl.store(node_scores + request * candidates + every, nothing, mask=every < candidates)
    tl.debug_barrier()  # scores of candidates go to the addresses of the -inf, new beams to the ones just read

    item = tl.arange(0, DRAWN)
    scores = tl.full((DRAWN,), float("-inf"), tl.float32)
    tokens = tl.zeros((DRAWN,), tl.int64)
    for row in range(rows):
        at = request * rows + row
        value, index, lse = found_in_row(best_value, best_index, totals, at, blocks, TOP_K, FOUND, BLOCKS)
        before = 0.0
        parent = step * 0 - 1
        if not FIRST:
            before = tl.sum(tl.where(beam == row, old_scores, 0.0), axis=0)
            parent = tl.sum(tl.where(beam == row, old_nodes, 0), axis=0)
        for j in range(TOP_K):
            value, index, best, token = take_best(value, index, draft_to_target, columns)
            score = before + tl.minimum(best - lse, 0.0)
            place = row * TOP_K + j
            scores = tl.where(item == place, score, scores)
            tokens = tl.where(item == place, token, tokens)
            to = request * candidates + number + place
            tl.store(node_scores + to, score)
            tl.store(node_token_ids + to, token)
            tl.store(node_parents + to, parent)

    free = item < rows * TOP_K
    for j in range(TOP_K):
        key = tl.where(free, scores, float("-inf"))
        best = tl.max(key, axis=0)
        place = tl.min(tl.where(free & (key == best), item, DRAWN), axis=0)
        free = free & (item != place)
        follows = place // TOP_K
        bits = (step * 0 + 1) << (step * TOP_K + j)
        source = request.to(tl.int64)
        if not FIRST:
            bits = bits | tl.sum(tl.where(beam == follows, old_bits, 0), axis=0)
            source = source * TOP_K + follows
        after = request * TOP_K + j
        tl.store(beam_scores + after, best)
        tl.store(beam_nodes + after, number + place)
        tl.store(beam_rows + after, source)
        tl.store(token_ids + after, tl.sum(tl.where(item == place, tokens, 0), axis=0))
        tl.store(ancestors + after, bits)


@triton.jit
def choose_kernel(
    node_scores, node_token_ids, node_parents, scratch, draft_token_ids, draft_parents, candidates, nodes,
    drafts_stride, parents_stride, CANDIDATES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write one request's best `nodes` candidates in the order of their numbers. scratch: int64 [R, candidates]."""
    if OVERLAP is not None:
        OVERLAP()
    request = tl.program_id(0)
    item = tl.arange(0, CANDIDATES)
    known = item < candidates
    at = request * candidates + item
    score = tl.load(node_scores + at, mask=known, other=float("-inf"))
    rank = tl.zeros((CANDIDATES,), tl.int32)
    for first in range(0, candidates, 16):
        other = first + tl.arange(0, 16)
        value = tl.load(node_scores + request * candidates + other, mask=other < candidates, other=float("-inf"))
        better = (value[None, :] > score[:, None]) | (
            (value[None, :] == score[:, None]) & (other[None, :] < item[:, None])
        )
        rank += tl.sum((better & (other < candidates)[None, :]).to(tl.int32), axis=1)
    chosen = known & (rank < nodes)
    row = tl.cumsum(chosen.to(tl.int32), axis=0)
    tl.store(scratch + at, tl.where(chosen, row, 0).to(tl.int64), mask=known)
    tl.debug_barrier()
    parent = tl.load(node_parents + at, mask=chosen, other=-1)
    follows = tl.load(scratch + request * candidates + parent, mask=chosen & (parent >= 0), other=0)
    tl.store(draft_token_ids + request * drafts_stride + row - 1, tl.load(node_token_ids + at, mask=chosen, other=0),
             mask=chosen)  # fmt: skip
    tl.store(draft_parents + request * parents_stride + row - 1, follows, mask=chosen)


@triton.jit
def advance_tree_kernel(
    base_lens, base_positions, block_table, seq_lens, positions, slot_mapping, draft_step, requests, rows, tree_len,
    table_stride, table_width, max_model_len, BLOCK: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program for all requests. ROWS is a power of two that holds requests * rows."""
    if OVERLAP is not None:
        OVERLAP()
    step = tl.load(draft_step) + 1
    item = tl.arange(0, ROWS)
    known = item < requests * rows
    request = item // rows
    length = tl.load(base_lens + request, mask=known, other=0)
    live = known & (length > 0)
    raw = length.to(tl.int64) + (step - 1) * rows + item % rows
    reserved = table_width * BLOCK
    table = block_table + request * table_stride
    slot = slots_of(raw, table, live, table_width, reserved, BLOCK)
    tl.store(slot_mapping + item, slot, mask=known)
    position = tl.load(base_positions + request, mask=known, other=0) + step
    tl.store(positions + item, tl.minimum(position, max_model_len - 1), mask=known)
    tl.store(seq_lens + request, tl.where(live, length + tree_len, 0), mask=known & (item % rows == 0))
    tl.debug_barrier()
    tl.store(draft_step, step)


class TreeOps(Launcher):
    """Implementations of the ops in `specgraph.ops.tree`, except `draft_block_tree`."""

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
            grow_kernel, (requests,),
            value, index, total, draft_to_target, draft_step, *candidates, *beams, number, columns, blocks, FIRST=first,
            TOP_K=k, BEAMS=power_of_two(k), FOUND=power_of_two(blocks * k), BLOCKS=power_of_two(blocks),
            DRAWN=power_of_two(drawn), CANDIDATES=power_of_two(number), num_warps=1,
        )  # fmt: skip

    def _top_tokens(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Run `scan_top_kernel` over logits [T, columns].

        Return values and columns, [T, blocks, count] each, and sums [T, blocks].
        """
        logits = contiguous_rows(logits)
        rows, columns = logits.shape
        blocks = ceil_div(columns, _COLUMNS)
        value = logits.new_empty((rows, blocks, count), dtype=torch.float32)
        index = logits.new_empty((rows, blocks, count), dtype=torch.int32)
        total = logits.new_empty((rows, blocks), dtype=torch.float32)
        self.launch(
            scan_top_kernel, (rows, blocks),
            logits, value, index, total, columns, logits.stride(0), blocks, TOP_K=count, COLUMNS=_COLUMNS, num_warps=8,
        )  # fmt: skip
        return value, index, total

    def choose_nodes(self, candidates: Candidates, tree: TreeNodes) -> None:
        requests, nodes = tree.token_ids.shape
        if requests and nodes:
            number = candidates.scores.shape[1]
            self.launch(
                choose_kernel, (requests,),
                *candidates, torch.empty_like(candidates.parents), *tree, number, nodes, tree.token_ids.stride(0),
                tree.parents.stride(0), CANDIDATES=power_of_two(number), num_warps=4,
            )  # fmt: skip

    def advance_tree(
        self, base_lens: Tensor, base_positions: Tensor, block_table: Tensor, *, tree_len: int, max_model_len: int,
        block_size: int, seq_lens: Tensor, positions: Tensor, slot_mapping: Tensor, draft_step: Tensor,
    ) -> None:  # fmt: skip
        requests = base_lens.shape[0]
        self.launch(
            advance_tree_kernel, (1,),
            base_lens, base_positions, block_table, seq_lens, positions, slot_mapping, draft_step, requests,
            positions.shape[0] // max(requests, 1), tree_len, block_table.stride(0), block_table.shape[1],
            max_model_len, BLOCK=block_size, ROWS=power_of_two(positions.shape[0]), num_warps=4,
        )  # fmt: skip
