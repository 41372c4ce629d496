"""Verifying a draft tree: its rows in the target's pass, the accepted path, and moving the path's keys and values.

A request has N rows: its last token, the root, and N - 1 nodes, each after its parent. Row i has the i-th KV slot after
the context whatever its depth; its position is that of its depth.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specgraph.ops import noise
from specgraph.ops.kv_cache import cells_of
from specgraph.ops.library import op
from specgraph.ops.rejection import commit
from specgraph.ops.slots import slots_of


@op(writes=("token_ids", "positions", "slot_mapping", "seq_lens", "ancestors"))
def begin_tree_verify(
    last_token_ids: Tensor,
    draft_token_ids: Tensor,
    draft_parents: Tensor,
    start_positions: Tensor,
    block_table: Tensor,
    *,
    num_steps: int,
    max_model_len: int,
    block_size: int,
    token_ids: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    seq_lens: Tensor,
    ancestors: Tensor,
) -> None:
    """Fill the rows of a verify pass over trees.

    Args:
        last_token_ids: int64 [R].
        draft_token_ids: int64 [R, N - 1]; -1 is no draft token and is rejected.
        draft_parents: int64 [R, N - 1]: the row that each node follows, smaller than its own, which is its column + 1.
        start_positions: int64 [R]: position of the last token; negative makes the request inert.
        block_table: int32 [R, max_blocks], with blocks for start + N tokens.
        num_steps: S, the depth of the deepest node.
        max_model_len, block_size: in tokens.
        token_ids, positions, slot_mapping: int64 [R * N], written. Nodes behind max_model_len have slots too: their
            own position may lie before it.
        seq_lens: int32 [R], written: start + N, or 0 for inert requests.
        ancestors: int64 [R * N], written: bit i of a row is set if row i is the row itself or one of its ancestors.
    """
    rows = draft_token_ids.shape[1] + 1
    live = (start_positions >= 0)[:, None]
    row = torch.arange(rows, device=live.device)
    parents = torch.cat([torch.zeros_like(draft_parents[:, :1]), draft_parents], dim=1)
    own = torch.ones_like(row) << row
    bits, depth = own.expand_as(parents), torch.zeros_like(parents)
    for _ in range(num_steps):  # each time what is known of the parents moves one level down
        bits = own | bits.gather(1, parents)
        depth = torch.where(row > 0, depth.gather(1, parents) + 1, 0)
    tokens = torch.cat([last_token_ids[:, None], draft_token_ids], dim=1)
    token_ids.copy_(torch.where(live, tokens, 0).clamp(min=0).flatten())
    positions.copy_(torch.where(live, start_positions[:, None] + depth, 0).clamp(0, max_model_len - 1).flatten())
    raw, reserved = start_positions[:, None] + row, block_table.shape[1] * block_size
    slot_mapping.copy_(slots_of(raw, block_table, live, reserved, block_size).flatten())
    seq_lens.copy_(torch.where(live[:, 0], start_positions + rows, 0))
    ancestors.copy_(bits.flatten())


def path_slots(slot_mapping: Tensor, path: Tensor, num_sampled: Tensor, from_slots: Tensor, to_slots: Tensor) -> None:
    """Write from where to where the keys and values of an accepted path move; slot 0 to slot 0 is no move.

    Args:
        slot_mapping: int64 [R * N]: slot of each row.
        path: int64 [R, S + 1]: the rows of the path, from row 0 on.
        num_sampled: int32 [R]: rows of the path that count.
        from_slots, to_slots: int64 [R * S], written.
    """
    slots = slot_mapping.view(path.shape[0], -1)
    place = torch.arange(1, path.shape[1], device=path.device)
    source, target = slots.gather(1, path[:, 1:]), slots[:, 1 : path.shape[1]]
    moved = (place < num_sampled[:, None]) & (source >= 0) & (target >= 0)
    from_slots.copy_(torch.where(moved, source, 0).flatten())
    to_slots.copy_(torch.where(moved, target, 0).flatten())


def own_tokens(
    target_logits: Tensor, rows: int, temperature: Tensor | None, seeds: Tensor | None, positions: Tensor
) -> Tensor:
    """The target's own token after each row, int64 [R * N]; arguments as in `verify_tree`, with N = `rows`."""
    chosen = target_logits.argmax(dim=-1)
    if temperature is None:
        return chosen
    assert seeds is not None
    warm, seed = temperature.repeat_interleave(rows)[:, None], seeds.repeat_interleave(rows)
    keys = target_logits.float() / torch.where(warm > 0, warm, 1.0)
    keys = keys + noise.gumbel(seed, positions + 1, noise.RESAMPLE, target_logits.shape[-1])
    return torch.where(warm[:, 0] > 0, keys.argmax(dim=-1), chosen)


@op(writes=("sampled_token_ids", "num_sampled", "path_rows", "from_slots", "to_slots"))
def verify_tree(
    target_logits: Tensor,
    draft_token_ids: Tensor,
    draft_parents: Tensor,
    temperature: Tensor | None,
    seeds: Tensor | None,
    start_positions: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    *,
    sampled_token_ids: Tensor,
    num_sampled: Tensor,
    path_rows: Tensor,
    from_slots: Tensor,
    to_slots: Tensor,
) -> None:
    """Accept the path of the tree that the target's own tokens follow.

    The target's own token of each row is the most likely one, or one draw from softmax(logits / temperature) with the
    noise of the position that it decides. Drafts in a tree are chosen without randomness; for such siblings, following
    that token accepts each with the probability that multi-round speculative sampling without replacement accepts it
    with, and the output is what the target alone would sample.

    Args:
        target_logits: [R * N, vocab]; each row scores the token after it.
        draft_token_ids, draft_parents, start_positions: as in `begin_tree_verify`.
        temperature: float32 [R], 0 is greedy; None where all requests are.
        seeds: int64 [R]; needed with temperature.
        positions, slot_mapping: int64 [R * N], as `begin_tree_verify` wrote them.
        sampled_token_ids: int64 [R, S + 1], written: accepted drafts, the target's own token, then -1.
        num_sampled: int32 [R], written: accepted + 1; 0 for inert requests.
        path_rows: int64 [R * (S + 1)], written: the row of the pass at each place of the path; after its end the last
            accepted one.
        from_slots, to_slots: int64 [R * S], written: what `move_kv` takes.
    """
    requests, depth = sampled_token_ids.shape
    rows = draft_token_ids.shape[1] + 1
    chosen = own_tokens(target_logits, rows, temperature, seeds, positions).view(requests, rows)
    live = start_positions >= 0
    row = torch.zeros(requests, 1, dtype=torch.int64, device=chosen.device)
    path, accepted, going = [row], torch.zeros_like(row[:, 0]), live
    for _ in range(depth - 1):
        match = (draft_parents == row) & (draft_token_ids == chosen.gather(1, row))
        going = going & match.any(dim=1)
        row = torch.where(going[:, None], match.int().argmax(dim=1, keepdim=True) + 1, row)
        accepted = accepted + going
        path.append(row)
    local = torch.cat(path, dim=1)
    place = torch.arange(depth, device=chosen.device)
    valid = (place <= accepted[:, None]) & live[:, None]
    sampled_token_ids.copy_(torch.where(valid, chosen.gather(1, local), -1))
    num_sampled.copy_(torch.where(live, accepted + 1, 0))
    path_rows.copy_((local + torch.arange(requests, device=chosen.device)[:, None] * rows).flatten())
    path_slots(slot_mapping, local, num_sampled, from_slots, to_slots)


@op(writes=("sampled_token_ids", "num_sampled", "path_rows", "from_slots", "to_slots"))
def verify_tree_synthetic(
    target_logits: Tensor,
    draft_token_ids: Tensor,
    chances: Tensor,
    seeds: Tensor,
    start_positions: Tensor,
    slot_mapping: Tensor,
    *,
    sampled_token_ids: Tensor,
    num_sampled: Tensor,
    path_rows: Tensor,
    from_slots: Tensor,
    to_slots: Tensor,
) -> None:
    """Accept a path of a length drawn by chance, whatever the tree is. The output is not the target's.

    For measuring speed at a known acceptance length: place i is accepted with probability chances[i] if all before it
    are, and takes the token of row N - S + i, so that keys and values are moved as after a real verify.

    Args:
        chances: float32 [S].
        seeds: int64 [R]: the decision is a function of seed and position. The others are as in `verify_tree`.
    """
    requests, depth = sampled_token_ids.shape
    rows, steps = draft_token_ids.shape[1] + 1, depth - 1
    position = start_positions.clamp(min=0)[:, None] + 1 + torch.arange(steps, device=seeds.device)
    u = noise.uniform(seeds.repeat_interleave(steps), position.flatten(), noise.ACCEPT, 1).view(requests, steps)
    accept, live = u < chances, start_positions >= 0
    local = torch.arange(rows - depth, rows, device=seeds.device) * (torch.arange(depth, device=seeds.device) > 0)
    local = local.expand(requests, depth)
    chosen = target_logits.argmax(dim=-1).view(requests, rows).gather(1, local)
    commit(accept, chosen, draft_token_ids.gather(1, local[:, 1:] - 1), live, sampled_token_ids, num_sampled)
    path_rows.copy_((local + torch.arange(requests, device=seeds.device)[:, None] * rows).flatten())
    path_slots(slot_mapping, local, num_sampled, from_slots, to_slots)


@op(writes=("key_cache", "value_cache"))
def move_kv(key_cache: Tensor, value_cache: Tensor, from_slots: Tensor, to_slots: Tensor) -> None:
    """Copy keys and values of one layer from slot to slot; all are read before any is written.

    Args:
        key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim] of any strides, written.
        from_slots, to_slots: int64 [M]. Slot 0, which is in the null block, is copied to itself where nothing moves.
    """
    for cache in (key_cache, value_cache):
        cells, source = cells_of(cache, from_slots)
        _, target = cells_of(cache, to_slots)
        cells.index_put_(target, cells[source])
