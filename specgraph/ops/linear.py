"""Linears with what a device can fuse into them: the norm before, the residual or activation or argmax after.

Each reference is the plain composition of torch ops that defines the models. A fused implementation may round once
where the composition rounds twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from specgraph.ops.draft_sampling import draft_block_greedy, draft_gumbel, write_drafts
from specgraph.ops.library import op


def normed(x: Tensor, norm: Tensor | None, eps: float) -> Tensor:
    """rms_norm of x [T, size], or x itself without a norm."""
    return x if norm is None else functional.rms_norm(x, (x.shape[-1],), norm, eps)


def linear_fake(x: Tensor, norm: Tensor | None, eps: float, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The shape of `norm_linear`, also over a quantised weight."""
    return x.new_empty(x.shape[0], weight.shape[0])


@op(fake=linear_fake)
def norm_linear(
    x: Tensor,
    norm: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """rms_norm(x) @ weight.T + bias + residual.

    Args:
        x: [T, in].
        norm: [in], or None for x as it is.
        eps: of the norm.
        weight: [out, in].
        bias: [out].
        residual: [T, out].

    Returns:
        [T, out] in the dtype of x.
    """
    out = functional.linear(normed(x, norm, eps), weight, bias)
    return out if residual is None else residual + out


def gate_up_fake(x: Tensor, norm: Tensor | None, eps: float, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The shape of `norm_gate_up`, also over a quantised weight."""
    return x.new_empty(x.shape[0], weight.shape[0] // 2)


@op(fake=gate_up_fake)
def norm_gate_up(x: Tensor, norm: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """silu(gate) * up of a gated MLP, where (gate | up) = rms_norm(x) @ weight.T + bias.

    Args:
        x, norm, eps: as in `norm_linear`.
        weight: [2 * inner, in], gate rows first.
        bias: [2 * inner].

    Returns:
        [T, inner] in the dtype of x.
    """
    gate, up = functional.linear(normed(x, norm, eps), weight, bias).chunk(2, dim=-1)
    return functional.silu(gate) * up


def pair_fake(
    token_ids: Tensor, table: Tensor, table_norm: Tensor | None, hidden: Tensor, hidden_norm: Tensor | None,
    eps: float, weight: Tensor, *args: Any, **kwargs: Any,
) -> Tensor:  # fmt: skip
    """The shape of `pair_linear`, also over a quantised weight."""
    return hidden.new_empty(hidden.shape[0], weight.shape[0])


@op(fake=pair_fake)
def pair_linear(
    token_ids: Tensor,
    table: Tensor,
    table_norm: Tensor | None,
    hidden: Tensor,
    hidden_norm: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """The first linear of a draft head: cat(rms_norm(table[token_ids]), rms_norm(hidden)) @ weight.T + bias.

    Args:
        token_ids: int64 [T].
        table: [vocab, E], the embedding; table_norm: [E], or None for no norm.
        hidden: [T, H]; hidden_norm: [H], or None for no norm.
        eps: of both norms.
        weight: [out, E + H].
        bias: [out].

    Returns:
        [T, out] in the dtype of hidden.
    """
    embedded = normed(functional.embedding(token_ids, table), table_norm, eps)
    return functional.linear(torch.cat((embedded, normed(hidden, hidden_norm, eps)), dim=-1), weight, bias)


@op(writes=("token_ids", "draft_token_ids"))
def greedy_head(
    x: Tensor,
    norm: Tensor | None,
    eps: float,
    weight: Tensor,
    draft_to_target: Tensor | None,
    draft_step: Tensor,
    token_ids: Tensor,
    draft_token_ids: Tensor,
) -> None:
    """`draft_greedy` of the logits rms_norm(x) @ weight.T, which need not exist in memory.

    Args:
        x: [R, in]; norm and eps as in `norm_linear`.
        weight: [draft_vocab, in].
        draft_to_target, draft_step, token_ids, draft_token_ids: as in `draft_greedy`.
    """
    logits = functional.linear(normed(x, norm, eps), weight)
    write_drafts(logits.argmax(dim=-1), draft_to_target, draft_step, token_ids, draft_token_ids)


@op(writes=("draft_token_ids",))
def greedy_block_head(
    x: Tensor, norm: Tensor | None, eps: float, weight: Tensor, draft_to_target: Tensor | None, draft_token_ids: Tensor
) -> None:
    """`draft_block_greedy` of the logits rms_norm(x) @ weight.T, which need not exist in memory.

    Args:
        x: [R * K, in]; norm and eps as in `norm_linear`.
        weight: [draft_vocab, in].
        draft_to_target, draft_token_ids: as in `draft_block_greedy`.
    """
    draft_block_greedy.reference(functional.linear(normed(x, norm, eps), weight), draft_to_target, draft_token_ids)


@op(writes=("token_ids", "draft_token_ids", "draft_probs"))
def gumbel_head(
    x: Tensor,
    norm: Tensor | None,
    eps: float,
    weight: Tensor,
    draft_to_target: Tensor | None,
    temperature: Tensor,
    seeds: Tensor,
    seq_lens: Tensor,
    draft_step: Tensor,
    token_ids: Tensor,
    draft_token_ids: Tensor,
    draft_probs: Tensor,
) -> None:
    """`draft_gumbel` of the logits rms_norm(x) @ weight.T.

    Args:
        x: [R, in]; norm and eps as in `norm_linear`.
        weight: [draft_vocab, in].
        draft_to_target, temperature, seeds, seq_lens, draft_step, token_ids, draft_token_ids, draft_probs: as in
            `draft_gumbel`.
    """
    draft_gumbel.reference(
        functional.linear(normed(x, norm, eps), weight), draft_to_target, temperature, seeds, seq_lens, draft_step,
        token_ids, draft_token_ids, draft_probs,
    )  # fmt: skip
