"""The verify of a draft tree: it accepts a path of the tree, whose keys and values then move to their positions.

A request has N rows in the target's pass: its last token, which is the root, and N - 1 nodes, each after its parent.
Row i has the i-th KV slot after the context at any depth. Its position is start + its depth.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from specgraph.buffers import Axes
from specgraph.ops import noise
from specgraph.ops.kv_cache import cells_of
from specgraph.ops.library import op
from specgraph.ops.tree import TreeNodes
from specgraph_run.decoder.ops.rejection import Acceptance, Sampled, accepted_by_chance, commit


class AcceptedPath(NamedTuple):
    """The rows of a target's pass that a verify accepted, and the moves of their keys and values."""

    rows: Annotated[Tensor, Axes("path")]
    """int64 [R * (S + 1)], written: the row of the pass at each place of the path. Places after the path's end have the
    last accepted row."""
    from_slots: Annotated[Tensor, Axes("moves")]
    """int64 [R * S], written: the argument of `move_kv`. From slot 0 to slot 0 is no move."""
    to_slots: Annotated[Tensor, Axes("moves")]
    """int64 [R * S], written."""


def own_tokens(target_logits: Tensor, acceptance: Acceptance, positions: Tensor) -> Tensor:
    """Return the target's own token after each row, int64 [R * N]. The arguments are as in `verify_tree`."""
    chosen = target_logits.argmax(dim=-1)
    if acceptance.temperature is None:
        return chosen
    assert acceptance.seeds is not None
    warm, seeds = acceptance.temperature[:, None, None], acceptance.seeds[:, None]
    logits = target_logits.float().view(warm.shape[0], -1, target_logits.shape[-1])
    keys = logits / torch.where(warm > 0, warm, 1.0)
    keys = keys + noise.gumbel(seeds, positions.view(logits.shape[:2]) + 1, noise.RESAMPLE, logits.shape[-1])
    return torch.where(warm[..., 0] > 0, keys.argmax(dim=-1), chosen.view(logits.shape[:2])).flatten()


@op(writes=("sampled", "path"))
def verify_tree(
    target_logits: Tensor,
    tree: TreeNodes,
    start_positions: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    acceptance: Acceptance,
    sampled: Sampled,
    path: AcceptedPath,
) -> None:
    """Accept the path of the tree that the target's own tokens follow.

    The target's own token after a row is the most likely one. With a temperature, it is a draw from
    softmax(logits / temperature) with the noise of the token's position. Drafts in a tree are chosen without
    randomness. So this accepts each sibling with the same probability as multi-round speculative sampling without
    replacement, and the output has the target's own distribution.

    With `chances`, float32 [S], the tokens don't matter: the length of the path is drawn by chance. Its place i + 1 is
    then row N - S + i, so that keys and values move as after a real verify.

    Args:
        target_logits: [R * N, vocab]; each row scores the token after it.
        start_positions: int64 [R], as in `begin_rows`.
        positions, slot_mapping: int64 [R * N], as `begin_rows` wrote them.
        sampled: [R, S + 1].
    """
    requests, depth = sampled.token_ids.shape
    rows = tree.token_ids.shape[1] + 1
    live, place = start_positions >= 0, torch.arange(depth, device=start_positions.device)
    chosen = own_tokens(target_logits, acceptance, positions).view(requests, rows)
    if acceptance.chances is None:
        local, accept = _followed_path(chosen, tree, live, depth)
    else:
        local = torch.where(place > 0, place + rows - depth, 0).expand(requests, depth)
        accept = accepted_by_chance(acceptance.chances, acceptance.seeds, start_positions)
    drafts = tree.token_ids.gather(1, (local[:, 1:] - 1).clamp(min=0))
    commit(accept, chosen.gather(1, local), drafts, live, sampled)
    path.rows.copy_((local + torch.arange(requests, device=chosen.device)[:, None] * rows).flatten())
    slots = slot_mapping.view(requests, rows)
    source, target = slots.gather(1, local[:, 1:]), slots[:, 1:depth]
    moved = (place[1:] < sampled.num_sampled[:, None]) & (source >= 0) & (target >= 0)
    path.from_slots.copy_(torch.where(moved, source, 0).flatten())
    path.to_slots.copy_(torch.where(moved, target, 0).flatten())


def _followed_path(chosen: Tensor, tree: TreeNodes, live: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """Follow the target's own tokens through the tree, from row 0 on.

    Return the path's rows, int64 [R, depth], and whether each row after the first is accepted, bool [R, depth - 1].
    """
    row, going = torch.zeros_like(chosen[:, :1]), live
    path, accept = [row], [live[:, None][:, :0]]
    for _ in range(depth - 1):
        match = (tree.parents == row) & (tree.token_ids == chosen.gather(1, row))
        going = going & match.any(dim=1)
        row = torch.where(going[:, None], match.int().argmax(dim=1, keepdim=True) + 1, row)
        path.append(row)
        accept.append(going[:, None])
    return torch.cat(path, dim=1), torch.cat(accept, dim=1)


@op(writes=("key_cache", "value_cache"))
def move_kv(key_cache: Tensor, value_cache: Tensor, from_slots: Tensor, to_slots: Tensor) -> None:
    """Copy keys and values of one layer from slot to slot. All slots are read before any is written.

    Args:
        key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim] of any strides, written.
        from_slots, to_slots: int64 [M]. An entry that moves nothing is 0 in both: slot 0 is in the null block.
    """
    for cache in (key_cache, value_cache):
        cells, source = cells_of(cache, from_slots)
        _, target = cells_of(cache, to_slots)
        cells.index_put_(target, cells[source])
