"""What a pre-norm decoder layer does around its linears, as ops a device can fuse.

Each reference is the plain composition of torch ops that the models are defined by; a fused implementation may round
once where the composition rounds twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from specgraph.kernels.draft_sampling import write_drafts
from specgraph.kernels.library import define


def normed(x: Tensor, norm: Tensor | None, eps: float) -> Tensor:
    """rms_norm of x [T, size], or x itself without a norm."""
    return x if norm is None else functional.rms_norm(x, (x.shape[-1],), norm, eps)


def norm_linear_reference(
    x: Tensor, norm: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None, residual: Tensor | None
) -> Tensor:
    """The composition `norm_linear` stands for, on any device."""
    out = functional.linear(normed(x, norm, eps), weight, bias)
    return out if residual is None else residual + out


def _linear_fake(x: Tensor, norm: Tensor | None, eps: float, weight: Tensor, *args: Any) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


_norm_linear_op = define(
    "norm_linear(Tensor x, Tensor? norm, float eps, Tensor weight, Tensor? bias, Tensor? residual) -> Tensor",
    reference=norm_linear_reference,
    fake=_linear_fake,
)


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
    return _norm_linear_op(x, norm, eps, weight, bias, residual)


def norm_gate_up_reference(x: Tensor, norm: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The composition `norm_gate_up` stands for, on any device."""
    gate, up = functional.linear(normed(x, norm, eps), weight, bias).chunk(2, dim=-1)
    return functional.silu(gate) * up


def _gate_up_fake(x: Tensor, norm: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0] // 2)


_norm_gate_up_op = define(
    "norm_gate_up(Tensor x, Tensor? norm, float eps, Tensor weight, Tensor? bias) -> Tensor",
    reference=norm_gate_up_reference,
    fake=_gate_up_fake,
)


def norm_gate_up(x: Tensor, norm: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """silu(gate) * up of a gated MLP, where (gate | up) = rms_norm(x) @ weight.T + bias.

    Args:
        x, norm, eps: as in `norm_linear`.
        weight: [2 * inner, in], gate rows first; bias [2 * inner].

    Returns:
        [T, inner] in the dtype of x.
    """
    return _norm_gate_up_op(x, norm, eps, weight, bias)


def pair_linear_reference(
    token_ids: Tensor,
    table: Tensor,
    table_norm: Tensor | None,
    hidden: Tensor,
    hidden_norm: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """The composition `pair_linear` stands for, on any device."""
    embedded = normed(functional.embedding(token_ids, table), table_norm, eps)
    return functional.linear(torch.cat((embedded, normed(hidden, hidden_norm, eps)), dim=-1), weight, bias)


def _pair_fake(
    token_ids: Tensor, table: Tensor, table_norm: Any, hidden: Tensor, hidden_norm: Any, eps: float, weight: Tensor,
    bias: Any,
) -> Tensor:  # fmt: skip
    return hidden.new_empty(hidden.shape[0], weight.shape[0])


_pair_linear_op = define(
    "pair_linear(Tensor token_ids, Tensor table, Tensor? table_norm, Tensor hidden, Tensor? hidden_norm, float eps,"
    " Tensor weight, Tensor? bias) -> Tensor",
    reference=pair_linear_reference,
    fake=_pair_fake,
)


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
    """The way into a draft head: cat(rms_norm(table[token_ids]), rms_norm(hidden)) @ weight.T + bias.

    Args:
        token_ids: int64 [T].
        table: [vocab, E]; table_norm [E], or None for no norm.
        hidden: [T, H]; hidden_norm [H], or None for no norm.
        eps: of both norms.
        weight: [out, E + H]; bias [out].

    Returns:
        [T, out] in the dtype of hidden.
    """
    return _pair_linear_op(token_ids, table, table_norm, hidden, hidden_norm, eps, weight, bias)


def greedy_head_reference(
    x: Tensor,
    norm: Tensor | None,
    eps: float,
    weight: Tensor,
    draft_to_target: Tensor | None,
    draft_step: Tensor,
    token_ids: Tensor,
    draft_token_ids: Tensor,
) -> None:
    """The composition `greedy_head` stands for, on any device."""
    logits = functional.linear(normed(x, norm, eps), weight)
    write_drafts(logits.argmax(dim=-1), draft_to_target, draft_step, token_ids, draft_token_ids)


_greedy_head_op = define(
    "greedy_head(Tensor x, Tensor? norm, float eps, Tensor weight, Tensor? draft_to_target, Tensor draft_step,"
    " Tensor(a!) token_ids, Tensor(b!) draft_token_ids) -> ()",
    reference=greedy_head_reference,
)


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
    _greedy_head_op(x, norm, eps, weight, draft_to_target, draft_step, token_ids, draft_token_ids)
