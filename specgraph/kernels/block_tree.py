"""Draws the tree of a drafter that drafts all positions in one pass: it searches the best tokens of each position."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.launch import power_of_two
from specgraph.kernels.tree import TreeOps, found_in_row, take_best
from specgraph.ops.tree import TreeNodes


@triton.jit
def block_tree_kernel(
    best_value, best_index, totals, draft_to_target, draft_token_ids, draft_parents, steps, nodes, columns, blocks,
    drafts_stride, parents_stride, TOP_K: tl.constexpr, FOUND: tl.constexpr, BLOCKS: tl.constexpr,
    PLACES: tl.constexpr, OPEN: tl.constexpr, NODES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Find the best `nodes` paths of one request in the results of `scan_top_kernel` for its `steps` rows.

    The search is best first: the next path is the best open one. It opens two more paths: itself with the next likely
    token in its last place, and itself with the most likely token added. These have no better score, and every path is
    opened once. Paths of equal score are ordered by length, then by `key`: the ranks of their tokens as the digits of a
    number in base TOP_K.

    FOUND, BLOCKS, PLACES, OPEN and NODES are powers of two that hold blocks * TOP_K, blocks, steps * TOP_K,
    2 * nodes + 1 and nodes.
    """
    if OVERLAP is not None:
        OVERLAP()
    request = tl.program_id(0)
    place = tl.arange(0, PLACES)
    log_probs = tl.full((PLACES,), float("-inf"), tl.float32)
    tokens = tl.zeros((PLACES,), tl.int64)
    zero = request.to(tl.int64) * 0
    unit = zero + 1  # the worth in a key of the first token's rank
    for step in range(steps):
        at = request * steps + step
        value, index, lse = found_in_row(best_value, best_index, totals, at, blocks, TOP_K, FOUND, BLOCKS)
        for j in range(TOP_K):
            value, index, best, token = take_best(value, index, draft_to_target, columns)
            here = place == step * TOP_K + j
            log_probs = tl.where(here, tl.minimum(best - lse, 0.0), log_probs)
            tokens = tl.where(here, token, tokens)
        if step > 0:
            unit = unit * TOP_K

    # The open paths: score, score without the last token, length, key, unit of the last token's rank in the key, the
    # node that they follow (-1 for the root), and the rank of the last token.
    item = tl.arange(0, OPEN)
    first = tl.sum(tl.where(place == 0, log_probs, 0.0), axis=0)
    live = item == 0
    score = tl.where(live, first, float("-inf"))
    before = tl.zeros((OPEN,), tl.float32)
    length = tl.full((OPEN,), 1, tl.int32)
    key = tl.zeros((OPEN,), tl.int64)
    units = tl.zeros((OPEN,), tl.int64) + unit
    follows = tl.full((OPEN,), -1, tl.int32)
    rank = tl.zeros((OPEN,), tl.int32)
    # The nodes, in the order in which they are found.
    node = tl.arange(0, NODES)
    node_length = tl.full((NODES,), 2147483647, tl.int32)
    node_key = tl.zeros((NODES,), tl.int64)
    node_follows = tl.full((NODES,), -1, tl.int32)
    node_token = tl.zeros((NODES,), tl.int64)
    for i in range(nodes):
        best = tl.max(tl.where(live, score, float("-inf")), axis=0)
        tie = live & (score == best)
        own_length = tl.min(tl.where(tie, length, 2147483647), axis=0)
        tie = tie & (length == own_length)
        own_key = tl.min(tl.where(tie, key, 9223372036854775807), axis=0)
        it = tie & (key == own_key)
        own_before = tl.sum(tl.where(it, before, 0.0), axis=0)
        own_unit = tl.sum(tl.where(it, units, 0), axis=0)
        own_follows = tl.sum(tl.where(it, follows, 0), axis=0)
        own_rank = tl.sum(tl.where(it, rank, 0), axis=0)
        at = (own_length - 1) * TOP_K + own_rank
        live = live & ~it
        new = node == i
        node_length = tl.where(new, own_length, node_length)
        node_key = tl.where(new, own_key, node_key)
        node_follows = tl.where(new, own_follows, node_follows)
        node_token = tl.where(new, tl.sum(tl.where(place == at, tokens, 0), axis=0), node_token)

        sibling = (item == 2 * i + 1) & (own_rank + 1 < TOP_K)
        longer = (item == 2 * i + 2) & (own_length < steps)
        next_token = tl.sum(tl.where(place == at + 1, log_probs, 0.0), axis=0)
        next_place = tl.sum(tl.where(place == own_length * TOP_K, log_probs, 0.0), axis=0)
        score = tl.where(sibling, own_before + next_token, tl.where(longer, best + next_place, score))
        before = tl.where(sibling, own_before, tl.where(longer, best, before))
        length = tl.where(sibling, own_length, tl.where(longer, own_length + 1, length))
        key = tl.where(sibling, own_key + own_unit, tl.where(longer, own_key, key))
        units = tl.where(sibling, own_unit, tl.where(longer, own_unit // TOP_K, units))
        follows = tl.where(sibling, own_follows, tl.where(longer, i, follows))
        rank = tl.where(sibling, own_rank + 1, tl.where(longer, 0, rank))
        live = live | sibling | longer

    # Sort the nodes by length and key, so that parents come first.
    earlier = (node_length[None, :] < node_length[:, None]) | (
        (node_length[None, :] == node_length[:, None]) & (node_key[None, :] < node_key[:, None])
    )
    column = tl.sum(earlier.to(tl.int32), axis=1)
    parent = tl.sum(tl.where(node_follows[:, None] == node[None, :], column[None, :] + 1, 0), axis=1)
    tl.store(draft_token_ids + request * drafts_stride + column, node_token, mask=node < nodes)
    tl.store(draft_parents + request * parents_stride + column, parent.to(tl.int64), mask=node < nodes)


class BlockTreeOps(TreeOps):
    """Implementations of `specgraph.ops.draft_block_tree` and of the other ops in `specgraph.ops.tree`."""

    __slots__ = ()

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
