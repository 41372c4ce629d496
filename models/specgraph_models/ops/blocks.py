"""Ops of block drafters: the convolutions and candidates of DFlash2, and the recurrent state of Domino."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from specgraph.ops.draft_sampling import Drafts, draft_from_logits
from specgraph.ops.library import like_first, op
from specgraph.ops.linear import Norm, Weight, norm_linear, normed

NO_CANDIDATE = -1e30
"""The logit of a token that is no candidate. It is finite, so that every block of columns has a largest logit."""


@op(fake=like_first)
def convolve_blocks(x: Tensor, base: Tensor, groups: Tensor, rows: int) -> Tensor:
    """Return x convolved inside its blocks: y[t] = sum over taps of x[t - tap] * (base[tap] + groups[t, tap]).

    Rows before a row's block count as zeros.

    Args:
        x: [T, size], T / rows blocks of `rows` rows.
        base: [taps, size].
        groups: [T, taps * G], rows of contiguous elements: for each tap, a number for each group of size / G channels.

    Returns:
        [T, size] in the dtype of x.
    """
    taps = base.shape[0]
    kernels = base.view(taps, groups.shape[1] // taps, -1) + groups.unflatten(1, (taps, -1))[..., None]
    kernels = kernels.view(-1, rows, *kernels.shape[1:])
    blocks = x.view(-1, rows, *kernels.shape[3:])
    out = blocks * kernels[:, :, 0]
    for tap in range(1, min(taps, rows)):
        out[:, tap:].addcmul_(blocks[:, :-tap], kernels[:, tap:, tap])
    return out.view(x.shape)


def _convolve_and_norm_fake(
    x: Tensor, base: Tensor, groups: Tensor, rows: int, residual: Tensor, norm: Norm
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


@op(fake=_convolve_and_norm_fake)
def convolve_and_norm(
    x: Tensor, base: Tensor, groups: Tensor, rows: int, residual: Tensor, norm: Norm
) -> tuple[Tensor, Tensor]:
    """Return total = convolve_blocks(x, base, groups, rows) + residual, and rms_norm(total). All are [T, size]."""
    total = residual + convolve_blocks.reference(x, base, groups, rows)
    return total, normed(total, *norm)


def _top_fake(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    shape = logits.shape[0], count
    return logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int64)


@op(fake=_top_fake)
def top_logits(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest logits of each row, largest first, and their columns.

    If more columns equal the last one, any of them may be taken.

    Args:
        logits: [T, vocab].
        count: at most vocab.

    Returns:
        Logits [T, count] in their dtype, and int64 [T, count].
    """
    return logits.topk(count, dim=-1)


class Shortlist(NamedTuple):
    """The candidates for one token of each of R requests, and the factors of a score that depends on the token before.

    The logit of candidate c is logits[c] + sum(successor[ids[c]] * state * predecessor[token before]).
    """

    ids: Tensor
    """int64 [R, k]: draft ids. None is twice in a row."""
    logits: Tensor
    """[R, k]"""
    state: Tensor
    """[R, r]"""
    predecessor: Tensor
    """[vocab, r]"""
    successor: Tensor
    """[draft_vocab, r]"""
    token_ids: Tensor
    """int64 [R]: the tokens before, as target ids."""

    def whole(self) -> Tensor:
        """Return the logits of all tokens, [R, draft_vocab]: `NO_CANDIDATE` for a token that is no candidate."""
        factors = functional.embedding(self.ids, self.successor) * self.state[:, None]
        scores = torch.baddbmm(self.logits[..., None], factors, self.predecessor[self.token_ids][..., None])[..., 0]
        lowest = max(NO_CANDIDATE, torch.finfo(scores.dtype).min)
        return scores.new_full((scores.shape[0], self.successor.shape[0]), lowest).scatter_(1, self.ids, scores)


@op(writes=("drafts.draft_token_ids",))
def draft_from_shortlist(shortlist: Shortlist, drafts: Drafts) -> None:
    """Draw the most likely candidate of each request, of equals the one with the lowest draft id.

    drafts: `draft_token_ids` has one column.
    """
    draft_from_logits.reference(shortlist.whole(), drafts)


def _state_fake(token_ids: Tensor, table: Tensor, state: Tensor, taken: Weight, kept: Weight) -> Tensor:
    return state.new_empty(state.shape)


@op(fake=_state_fake)
def next_state(token_ids: Tensor, table: Tensor, state: Tensor, taken: Weight, kept: Weight) -> Tensor:
    """Return the state of a gated recurrent unit after a token: [R, G] in the dtype of state.

    (reset, update, candidate) are thirds of both products. With t and s the products of token and state,
    new = tanh(t + sigmoid(reset) * s), and the result is new + sigmoid(update) * (state - new).

    Args:
        token_ids: int64 [R].
        table: [vocab, size], the tokens' embeddings.
        state: [R, G].
        taken: [3 * G, size], applied to the embedding.
        kept: [3 * G, G], applied to the state.
    """
    size = state.shape[1]
    of_token = norm_linear.reference(table[token_ids], None, taken).split((2 * size, size), dim=-1)
    of_state = norm_linear.reference(state, None, kept).split((2 * size, size), dim=-1)
    reset, update = torch.sigmoid(of_token[0] + of_state[0]).chunk(2, dim=-1)
    candidate = torch.tanh(torch.addcmul(of_token[1], reset, of_state[1]))
    return torch.addcmul(candidate, update, state - candidate)  # not every device has an op for lerp


def _sum_fake(x: Tensor, weight: Tensor, added: Tensor) -> Tensor:
    return added.new_empty(added.shape)


@op(fake=_sum_fake)
def silu_of_sum(x: Tensor, weight: Tensor, added: Tensor) -> Tensor:
    """Return silu(x @ weight.T + added), [R, out], of x [R, in], weight [out, in] and added [R, out].

    The rows of weight may be parts of longer ones.
    """
    return functional.silu(functional.linear(x, weight) + added)
