"""Ops that draw a draft tree: the candidates of each draft step, the rows of the next one, and the nodes to verify.

A *candidate* is a token that was drawn after a node. Its score is the sum of the log-probabilities on its path.
Candidates are numbered in the order in which they are drawn: k in draft step 0, k * k in each later one. The next draft
step *expands* the k best of a draft step. On every device a tie goes to the lower draft id if the tokens are of one
row. Otherwise it goes to the lower candidate number.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from specgraph.buffers import Axes, PerRequest
from specgraph.ops.draft_sampling import to_target_ids
from specgraph.ops.library import op
from specgraph.ops.slots import slots_of

PerExpanded = Annotated[Tensor, Axes("later")]
"""[R * k]: the rows of a later draft step, one per expanded node."""


class TreeNodes(NamedTuple):
    """The nodes to verify. A parent comes before its children."""

    token_ids: Tensor
    """int64 [R, N - 1]: target ids; -1 is no draft token and is rejected."""
    parents: Tensor
    """int64 [R, N - 1]: the parent's row in the target's pass, smaller than the node's own row. Row 0 is the request's
    last token, row i + 1 is the node of column i."""


class Candidates(NamedTuple):
    """The candidates of all S draft steps by number: C = k + (S - 1) * k * k."""

    scores: PerRequest
    """float32 [R, C]; -inf for candidates of draft steps to come."""
    token_ids: PerRequest
    """int64 [R, C]: target ids."""
    parents: PerRequest
    """int64 [R, C]: the number of the candidate before, or -1 if that is the request's last token."""


class Beams(NamedTuple):
    """The k candidates per request that the rows of a draft step continue."""

    scores: PerRequest
    """float32 [R, k]"""
    candidates: PerRequest
    """int64 [R, k]: the candidates' numbers."""
    rows: PerExpanded
    """int64 [R * k]: for each row of the next draft step, the row of this one that it follows."""
    token_ids: PerExpanded
    """int64 [R * k]: the tokens of the next draft step's rows."""
    ancestors: PerExpanded
    """int64 [R * k]: the bits of each row's ancestors and of itself. Row j of draft step s + 1 has bit s * k + j."""


def top_tokens(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` most likely tokens of each row, most likely first. Among equals the lower id comes first.

    argmax takes the first of equal values; torch.topk may take any.

    Args:
        logits: float32 [T, vocab].
        count: at most vocab.

    Returns:
        The tokens' log-probabilities, float32 [T, count], and ids, int64 [T, count].
    """
    ids: list[Tensor] = []
    rest = logits
    for _ in range(count):
        best = rest.argmax(dim=-1, keepdim=True)
        rest = rest.scatter(1, best, float("-inf"))
        ids.append(best)
    chosen = torch.cat(ids, dim=1)
    log_probs = logits.gather(1, chosen) - torch.logsumexp(logits, dim=-1, keepdim=True)
    return log_probs.clamp(max=0.0), chosen


@op(writes=("candidates", "beams"))
def grow_tree(
    logits: Tensor,
    draft_to_target: Tensor | None,
    draft_step: Tensor,
    first: bool,
    candidates: Candidates,
    beams: Beams,
) -> None:
    """Add the candidates of one draft step, and make its k best the rows of the next one.

    Args:
        logits: [R, draft_vocab] in draft step 0, [R * k, draft_vocab] later.
        draft_to_target: as in `Drafts`.
        draft_step: int64 [1]: the draft step that made the logits.
        first: this is draft step 0. The old contents of candidates and beams are then ignored.
        candidates: written at the numbers of this draft step's candidates.
        beams: read as the rows of this draft step, and written as the rows of the next one.
    """
    requests, k = beams.scores.shape
    log_probs, ids = top_tokens(logits.float(), k)
    ids = to_target_ids(ids, draft_to_target).view(requests, -1)
    number = torch.arange(ids.shape[1], device=logits.device)
    if first:
        candidates.scores.fill_(float("-inf"))
        scores, parents = log_probs, torch.full_like(ids, -1)
    else:
        scores = (beams.scores[:, :, None] + log_probs.view(requests, k, k)).flatten(1)
        parents = beams.candidates.repeat_interleave(k, dim=1)
        number = number + k + (draft_step - 1) * (k * k)
    for buffer, values in zip(candidates, (scores, ids, parents), strict=True):
        buffer.index_copy_(1, number, values)
    best, order = (part[:, :k] for part in scores.sort(dim=1, descending=True, stable=True))
    request = torch.arange(requests, device=logits.device)[:, None]
    bits = torch.ones_like(number[:k]) << (draft_step * k + torch.arange(k, device=logits.device))
    bits = bits.expand(requests, k)
    if not first:
        bits = bits | beams.ancestors.view(requests, k).gather(1, order // k)
    beams.rows.copy_((request if first else request * k + order // k).expand(requests, k).flatten())
    beams.scores.copy_(best)
    beams.candidates.copy_(number[order])
    beams.token_ids.copy_(ids.gather(1, order).flatten())
    beams.ancestors.copy_(bits.flatten())


@op(writes=("tree",))
def draft_block_tree(logits: Tensor, draft_to_target: Tensor | None, top_k: int, tree: TreeNodes) -> None:
    """Write the tree of a drafter that drafts all positions in one pass: the best N - 1 paths of any length.

    A token does not depend on the tokens before it. So every path through the `top_k` tokens of each position is a
    candidate: there are top_k ** d paths of length d. The score of a path is the sum of its tokens' log-probabilities.
    Among equals the shorter path comes first, then the path with the more likely first tokens.

    Every beginning of one of the best N - 1 paths is among the best N - 1 of its length, so only these are extended.

    Args:
        logits: [R * S, draft_vocab]: S positions per request.
        draft_to_target: as in `Drafts`.
        top_k: tokens per position, at most draft_vocab.
        tree: written. There must be at least N - 1 paths.
    """
    requests, nodes = tree.token_ids.shape
    if requests == 0:
        return
    log_probs, ids = (part.view(requests, -1, top_k) for part in top_tokens(logits.float(), top_k))
    ids, drawn = to_target_ids(ids, draft_to_target), 0
    beam_scores, beam_nodes = log_probs.new_zeros(requests, 1), ids.new_full((requests, 1), -1)
    levels: list[tuple[Tensor, Tensor, Tensor]] = []
    for position in range(ids.shape[1]):
        scores = (beam_scores[:, :, None] + log_probs[:, position, None, :]).flatten(1)
        tokens = ids[:, position].repeat(1, beam_scores.shape[1])
        levels.append((scores, tokens, beam_nodes.repeat_interleave(top_k, dim=1)))
        # Sorted by path, not by score, so that ties are decided by the same order at every length.
        best = scores.sort(dim=1, descending=True, stable=True).indices[:, :nodes].sort(dim=1).values
        beam_scores, beam_nodes, drawn = scores.gather(1, best), best + drawn, drawn + scores.shape[1]
    scores, tokens, parents = (torch.cat(parts, dim=1) for parts in zip(*levels, strict=True))
    choose_nodes.reference(Candidates(scores, tokens, parents), tree)


@op(writes=("tree",))
def choose_nodes(candidates: Candidates, tree: TreeNodes) -> None:
    """Write the best N - 1 candidates of each request, in the order in which they were drawn.

    A request must have at least N - 1 candidates.
    """
    requests, nodes = tree.token_ids.shape
    order = candidates.scores.sort(dim=1, descending=True, stable=True).indices[:, :nodes]
    chosen = order.sort(dim=1).values
    rows = torch.arange(1, nodes + 1, device=chosen.device).expand(requests, nodes)
    row_of = torch.zeros_like(candidates.parents).scatter_(1, chosen, rows)
    parents = candidates.parents.gather(1, chosen)
    tree.token_ids.copy_(candidates.token_ids.gather(1, chosen))
    tree.parents.copy_(torch.where(parents < 0, 0, row_of.gather(1, parents.clamp(min=0))))


@op(writes=("seq_lens", "positions", "slot_mapping", "draft_step"))
def advance_tree(
    base_lens: Tensor,
    base_positions: Tensor,
    block_table: Tensor,
    *,
    tree_len: int,
    max_model_len: int,
    block_size: int,
    seq_lens: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    draft_step: Tensor,
) -> None:
    """Move the k rows per request one level down the tree, in place. Inert requests stay inert.

    The k rows of a level share one position and have k slots. The slots of all levels follow the context in order.

    Args:
        base_lens: int32 [R]: the keys up to and including the last accepted token's row; 0 for inert requests.
        base_positions: int64 [R]: the position of that row.
        block_table: int32 [R, max_blocks], with blocks for base_len + tree_len tokens.
        tree_len: (S - 1) * k, the keys of all levels.
        max_model_len, block_size: in tokens.
        seq_lens: int32 [R], written: base_len + tree_len, or 0.
        positions, slot_mapping: int64 [R * k], written.
        draft_step: int64 [1]: 1 is added.
    """
    requests = base_lens.shape[0]
    draft_step.add_(1)
    live = base_lens > 0
    column = torch.arange(positions.shape[0] // requests, device=live.device)
    raw = base_lens[:, None].long() + (draft_step - 1) * column.shape[0] + column
    reserved = block_table.shape[1] * block_size
    slot_mapping.copy_(slots_of(raw, block_table, live[:, None], reserved, block_size).flatten())
    position = (base_positions + draft_step).clamp(max=max_model_len - 1)
    positions.copy_(position.repeat_interleave(column.shape[0]))
    seq_lens.copy_(torch.where(live, base_lens + tree_len, 0))
