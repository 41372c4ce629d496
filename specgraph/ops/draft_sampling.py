"""Drawing draft tokens, greedily or by temperature, and writing them where the next step reads them; and one op for the
end of one greedy draft step and the beginning of the next."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from specgraph.ops import noise
from specgraph.ops.library import op
from specgraph.ops.linear import PairInput, normed
from specgraph.ops.slots import advance


class LmHead(NamedTuple):
    """The projection to a drafter's logits: rms_norm(hidden) @ weight.T, plus others that are there already."""

    norm: Tensor | None
    """[in]; None for hidden states as they are."""
    eps: float
    """Epsilon of the norm."""
    weight: Tensor
    """[draft_vocab, in]"""
    added: Tensor | None = None
    """[rows, draft_vocab], in the dtype of hidden states: what is added to the product; None for nothing."""
    row_ids: Tensor | None = None
    """int64 [rows]: the row of the hidden states, then a table of any length, that each row of logits is made from."""
    turn: int | None = None
    """The number of this draw among draws in order by the same weight; None for one alone. A device may read the weight
    in the other direction every second turn, and finds in its cache what it read last."""

    def taken(self, x: Tensor) -> Tensor:
        """Return the hidden states [rows, in] of x, which holds them or is the table."""
        return x if self.row_ids is None else functional.embedding(self.row_ids, x)

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits of x, [rows, draft_vocab]."""
        product = functional.linear(normed(self.taken(x), self.norm, self.eps), self.weight)
        return product if self.added is None else self.added + product


class Drafts(NamedTuple):
    """The place of drawn tokens: column `draft_step` of each request, or without one its K columns, a row for each."""

    draft_token_ids: Tensor
    """int64 [R, K], written: target ids."""
    draft_to_target: Tensor | None = None
    """int64 [draft_vocab]: target id minus draft id; None if the vocabularies are the same."""
    draft_step: Tensor | None = None
    """int64 [1]: a device tensor, so that one captured step serves every step."""
    token_ids: Tensor | None = None
    """int64 [R], written: the next step's input. Needed with `draft_step`."""

    @property
    def rows(self) -> int:
        """Rows of logits per request."""
        return self.draft_token_ids.shape[1] if self.draft_step is None else 1


class Draws(NamedTuple):
    """Drawing from softmax(logits / temperature). The noise of a token is that of its request's seed and its position:
    row j of a request draws the token of position positions + more_positions + 1 + j."""

    temperature: Tensor
    """float32 [R]; 0 is greedy, with a one-hot distribution."""
    seeds: Tensor
    """int64 [R]; draft programs give those of `noise.draft_seeds`."""
    positions: Tensor
    """int64 or int32 [R]. A chain's row at position seq_len - 1 holds the token of position seq_len and draws the one
    after it, so its `seq_lens` are these."""
    more_positions: Tensor | None
    """int32 [R]; None for none."""
    draft_probs: Tensor
    """float32 [R, K, draft_vocab], written where the tokens are: the distributions they came from."""


def to_target_ids(draft_ids: Tensor, draft_to_target: Tensor | None) -> Tensor:
    """Ids in the target's vocabulary. `draft_to_target` holds the offset of each draft id, or is None for equal ids."""
    return draft_ids if draft_to_target is None else draft_ids + draft_to_target[draft_ids]


def write_drafts(draft_ids: Tensor, drafts: Drafts) -> None:
    """Write one draft id per row, int64 [R * rows], as target ids."""
    ids = to_target_ids(draft_ids, drafts.draft_to_target)
    if drafts.token_ids is not None:
        drafts.token_ids.copy_(ids)
    _write_rows(ids, drafts.draft_step, drafts.draft_token_ids)


def _write_rows(values: Tensor, draft_step: Tensor | None, out: Tensor) -> None:
    """Write values [R * rows, ...] to column `draft_step` of out [R, K, ...], or to all columns."""
    if draft_step is None:
        out.copy_(values.view(out.shape))
    else:
        out.index_copy_(1, draft_step, values[:, None])


def sample_rows(logits: Tensor, rows: int, draws: Draws) -> tuple[Tensor, Tensor]:
    """One token per row from softmax(logits / temperature), by the Gumbel-max trick.

    Args:
        logits: [R * rows, vocab].
        rows: rows per request.

    Returns:
        Token ids int64 [R * rows], and the distributions they came from, float32 [R * rows, vocab].
    """
    temperature = draws.temperature[:, None, None]
    sampled = temperature > 0
    scaled = logits.float().view(-1, rows, logits.shape[-1]) / torch.where(sampled, temperature, 1.0)
    first = draws.positions.long() if draws.more_positions is None else draws.positions + draws.more_positions
    positions = first[:, None] + 1 + torch.arange(rows, device=logits.device)
    keys = scaled + noise.gumbel(draws.seeds[:, None], positions, noise.DRAFT, logits.shape[-1])
    ids = torch.where(sampled, keys, scaled).argmax(dim=-1)
    one_hot = torch.zeros_like(scaled).scatter_(2, ids[..., None], 1.0)
    return ids.flatten(), torch.where(sampled, torch.softmax(scaled, dim=-1), one_hot).flatten(0, 1)


@op(writes=("drafts.draft_token_ids", "drafts.token_ids", "draws.draft_probs"))
def draft_from_logits(logits: Tensor, drafts: Drafts, draws: Draws | None = None) -> None:
    """Draw one draft token per row of logits [R, draft_vocab], or [R * K, draft_vocab] of a parallel drafter's block:
    the most likely one, or with `draws` one from softmax(logits / temperature)."""
    if draws is None:
        ids = logits.argmax(dim=-1)
    else:
        ids, probs = sample_rows(logits, drafts.rows, draws)
        _write_rows(probs, drafts.draft_step, draws.draft_probs)
    write_drafts(ids, drafts)


@op(writes=("drafts.draft_token_ids", "drafts.token_ids", "draws.draft_probs"))
def draft_from_hidden(x: Tensor, head: LmHead, drafts: Drafts, draws: Draws | None = None) -> None:
    """`draft_from_logits` of the logits of hidden states x, which need not exist in memory; see `LmHead.logits`."""
    draft_from_logits.reference(head.logits(x), drafts, draws)


def _next_step_fake(
    x: Tensor, head: LmHead, drafts: Drafts, seq_lens: Tensor, positions: Tensor, slot_mapping: Tensor,
    block_table: Tensor, max_model_len: int, block_size: int, hidden: Tensor, pair: PairInput,
) -> Tensor:  # fmt: skip
    return hidden.new_empty(hidden.shape[0], pair.table.shape[1] + hidden.shape[1])


@op(
    writes=("drafts.draft_step", "drafts.token_ids", "drafts.draft_token_ids", "seq_lens", "positions", "slot_mapping"),
    fake=_next_step_fake,
)
def greedy_next_step(
    x: Tensor,
    head: LmHead,
    drafts: Drafts,
    seq_lens: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    block_table: Tensor,
    max_model_len: int,
    block_size: int,
    hidden: Tensor,
    pair: PairInput,
) -> Tensor:
    """`draft_from_hidden`, then `advance`, then the input of the next step's first linear, see `pair_linear`.

    Args:
        x, head, drafts: as in `draft_from_hidden`; 1 is added to `draft_step`.
        seq_lens, positions, slot_mapping, block_table, max_model_len, block_size: as in `advance`.
        hidden, pair: as in `pair_linear`.

    Returns:
        `PairInput.rows` of the drafts and hidden: [R, E + H] in the dtype of hidden.
    """
    assert drafts.draft_step is not None
    assert drafts.token_ids is not None
    draft_from_hidden.reference(x, head, drafts)
    advance.reference(seq_lens, positions, slot_mapping, drafts.draft_step, block_table, max_model_len, block_size)
    return pair.rows(drafts.token_ids, hidden)
