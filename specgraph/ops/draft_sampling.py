"""Ops that draw draft tokens, greedily or by temperature, and write them where the next draft step reads them."""

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
    """The projection to a drafter's logits: rms_norm(hidden) @ weight.T, plus logits that were computed before."""

    norm: Tensor | None
    """[in]; None for no norm."""
    eps: float
    """Epsilon of the norm."""
    weight: Tensor
    """[draft_vocab, in]"""
    added: Tensor | None = None
    """[rows, draft_vocab] in the dtype of hidden states: logits to add to the product. None if there are none."""
    row_ids: Tensor | None = None
    """int64 [rows]: hidden states are looked up in a table, and logits i come from its row row_ids[i]. None if hidden
    states are given row by row."""
    turn: int | None = None
    """The number of this draw among successive draws with the same weight; None for a single draw. A device may read
    the weight backwards every second turn: its cache then still has the part that it read last."""

    def taken(self, x: Tensor) -> Tensor:
        """Return the hidden states [rows, in]: x itself, or with `row_ids` the rows of the table x."""
        return x if self.row_ids is None else functional.embedding(self.row_ids, x)

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits [rows, draft_vocab] of x, which is as in `taken`."""
        product = functional.linear(normed(self.taken(x), self.norm, self.eps), self.weight)
        return product if self.added is None else self.added + product


class Drafts(NamedTuple):
    """The buffers that drawn tokens are written to.

    With `draft_step` there is one row of logits per request, and its token goes to that column. Without it there are K
    rows per request, one for each column.
    """

    draft_token_ids: Tensor
    """int64 [R, K], written: target ids."""
    draft_to_target: Tensor | None = None
    """int64 [draft_vocab]: target id minus draft id; None if the vocabularies are the same."""
    draft_step: Tensor | None = None
    """int64 [1]: a device tensor, so that one captured draft step serves every draft step."""
    token_ids: Tensor | None = None
    """int64 [R], written: the input of the next draft step. Needed with `draft_step`."""

    @property
    def rows(self) -> int:
        """Rows of logits per request."""
        return self.draft_token_ids.shape[1] if self.draft_step is None else 1


class Draws(NamedTuple):
    """The parameters of draws from softmax(logits / temperature).

    Row j of a request draws the token at position positions + more_positions + 1 + j. The noise depends on that
    position and the request's seed only.
    """

    temperature: Tensor
    """float32 [R]; 0 is greedy, with a one-hot distribution."""
    seeds: Tensor
    """int64 [R]; draft programs take them from `noise.draft_seeds`."""
    positions: Tensor
    """int64 or int32 [R]. A chain passes its `seq_lens`: its row at position seq_len - 1 holds the token of position
    seq_len, and draws the token after that."""
    more_positions: Tensor | None
    """int32 [R], added to `positions`; None adds nothing."""
    draft_probs: Tensor
    """float32 [R, K, draft_vocab], written in the columns of the tokens: the distributions they were drawn from."""


def to_target_ids(draft_ids: Tensor, draft_to_target: Tensor | None) -> Tensor:
    """Return target ids of draft ids. `draft_to_target` has the offset of each draft id; None if ids are equal."""
    return draft_ids if draft_to_target is None else draft_ids + draft_to_target[draft_ids]


def write_drafts(draft_ids: Tensor, drafts: Drafts) -> None:
    """Write the draft ids of all rows, int64 [R * rows], as target ids."""
    ids = to_target_ids(draft_ids, drafts.draft_to_target)
    if drafts.token_ids is not None:
        drafts.token_ids.copy_(ids)
    _write_rows(ids, drafts.draft_step, drafts.draft_token_ids)


def _write_rows(values: Tensor, draft_step: Tensor | None, out: Tensor) -> None:
    """Write values [R * rows, ...] to column `draft_step` of out [R, K, ...]. Without `draft_step`, to all columns."""
    if draft_step is None:
        out.copy_(values.view(out.shape))
    else:
        out.index_copy_(1, draft_step, values[:, None])


def sample_rows(logits: Tensor, rows: int, draws: Draws) -> tuple[Tensor, Tensor]:
    """Draw one token per row from softmax(logits / temperature), by the Gumbel-max trick.

    Args:
        logits: [R * rows, vocab].
        rows: rows per request.

    Returns:
        Token ids, int64 [R * rows], and the distributions they were drawn from, float32 [R * rows, vocab].
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
    """Draw one draft token per row: the most likely one, or with `draws` one from softmax(logits / temperature).

    Args:
        logits: [R, draft_vocab], or [R * K, draft_vocab] for a drafter that drafts K tokens in one pass.
    """
    if draws is None:
        ids = logits.argmax(dim=-1)
    else:
        ids, probs = sample_rows(logits, drafts.rows, draws)
        _write_rows(probs, drafts.draft_step, draws.draft_probs)
    write_drafts(ids, drafts)


@op(writes=("drafts.draft_token_ids", "drafts.token_ids", "draws.draft_probs"))
def draft_from_hidden(x: Tensor, head: LmHead, drafts: Drafts, draws: Draws | None = None) -> None:
    """Run `draft_from_logits` on `head.logits(x)`. An implementation need not store the logits."""
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
    """Run `draft_from_hidden`, then `advance`, and return the input of the next draft step's first linear.

    Args:
        x, head, drafts: as in `draft_from_hidden`; 1 is added to `draft_step`.
        seq_lens, positions, slot_mapping, block_table, max_model_len, block_size: as in `advance`.
        hidden: [R, H], the hidden states of the next draft step's rows.
        pair: makes the result.

    Returns:
        `pair.rows` of the drafted tokens and hidden: [R, E + H] in the dtype of hidden.
    """
    assert drafts.draft_step is not None
    assert drafts.token_ids is not None
    draft_from_hidden.reference(x, head, drafts)
    advance.reference(seq_lens, positions, slot_mapping, drafts.draft_step, block_table, max_model_len, block_size)
    return pair.rows(drafts.token_ids, hidden)
