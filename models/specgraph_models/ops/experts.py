"""The gated MLPs of a mixture of experts: each row goes through the experts that a router chose for it.

Shapes are fixed: T rows give T * top_k pairs of row and expert for any choice of experts. The rows of each expert are
counted on the device, so a captured pass replays with other choices.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from specgraph.ops.library import like_first, op
from specgraph.ops.linear import Weight, product


def gated(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """Return the activation of a gated MLP: [..., 2 * inner] (gate | up) -> [..., inner].

    It is silu(gate) * up. With a `limit` both are first clamped to it, and the result is
    gate * sigmoid(alpha * gate) * (up + 1) (gpt-oss).
    """
    gate, up = gate_up.chunk(2, dim=-1)
    if not limit:
        return functional.silu(gate) * up
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return gate * torch.sigmoid(gate * alpha) * (up + 1)


def _of(stacked: Weight, expert: int) -> Weight:
    return Weight(stacked.matrix[expert], None if stacked.bias is None else stacked.bias[expert])


def _grouped(
    x: Tensor, expert_ids: Tensor, num_experts: int, first_expert: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the pairs of row and expert, ordered by expert. Pairs with experts of other ranks come last.

    Returns:
        The ordered pairs' rows of x, [T * top_k, in]; the order, int64 [T * top_k]; the end of each expert's pairs,
        int32 [num_experts]; and the pairs' experts, int64 [T * top_k], counted from `first_expert`, or num_experts for
        an expert of another rank.
    """
    flat = expert_ids.flatten() - first_expert
    flat = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    order = flat.argsort(stable=True)
    counts = (flat[:, None] == torch.arange(num_experts, device=flat.device)).sum(dim=0)
    return x[order // expert_ids.shape[1]], order, counts.cumsum(0).int(), flat[order]


def _combined(out: Tensor, order: Tensor, expert_weights: Tensor) -> Tensor:
    """Put the results of the ordered pairs [T * top_k, in] back in place, and add them by row with weights: [T, in]."""
    pairs = torch.empty_like(out).index_copy_(0, order, out).view(*expert_weights.shape, -1)
    return (pairs * expert_weights[..., None].to(out.dtype)).sum(dim=1)


def _on_host(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Weight,
    down: Weight,
    alpha: float = 1.0,
    limit: float = 0.0,
    first_expert: int = 0,
) -> Tensor:
    rows, order, ends, _ = _grouped(x, expert_ids, gate_up.matrix.shape[0], first_expert)
    out = torch.zeros_like(rows)
    for expert, (begin, end) in enumerate(pairwise([0, *ends.tolist()])):
        if begin < end:
            inner = gated(product(rows[begin:end], _of(gate_up, expert)), alpha, limit)
            out[begin:end] = product(inner, _of(down, expert))
    return _combined(out, order, expert_weights)


def grouped_expert_mlp(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Weight,
    down: Weight,
    alpha: float = 1.0,
    limit: float = 0.0,
    first_expert: int = 0,
) -> Tensor:
    """Implement `expert_mlp` with torch's grouped matmul, for bfloat16 and rows of a multiple of 16 bytes.

    Return NotImplemented for other dtypes and sizes, and if torch has no grouped matmul.
    """
    matmul: Callable[..., Tensor] | None = getattr(torch, "_grouped_mm", None)  # public only in newer versions
    aligned = all(weight.matrix.shape[2] % 8 == 0 for weight in (gate_up, down))
    if matmul is None or x.dtype is not torch.bfloat16 or not aligned:
        return NotImplemented
    count = gate_up.matrix.shape[0]
    rows, order, ends, expert = _grouped(x, expert_ids, count, first_expert)

    def products(y: Tensor, weight: Weight) -> Tensor:
        out = matmul(y, weight.matrix.transpose(-2, -1), offs=ends)
        return out if weight.bias is None else out + weight.bias[expert.clamp(max=count - 1)]

    out = products(gated(products(rows, gate_up), alpha, limit), down)
    out = torch.where((expert < count)[:, None], out, 0)  # the product leaves rows past the last end unwritten
    return _combined(out, order, expert_weights)


@op(fake=like_first, host=_on_host)
def expert_mlp(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Weight,
    down: Weight,
    alpha: float = 1.0,
    limit: float = 0.0,
    first_expert: int = 0,
) -> Tensor:
    """Return the weighted sum of the chosen experts' MLPs, for each row.

    The reference runs every row through every expert, because it may not read the choice.

    Args:
        x: [T, in].
        expert_ids: int64 [T, top_k], without repetition in a row. An expert outside first_expert .. first_expert +
            num_experts belongs to another rank and adds nothing.
        expert_weights: [T, top_k].
        gate_up: stacked by expert: [num_experts, 2 * inner, in], gate rows first.
        down: [num_experts, in, inner].
        alpha, limit: see `gated`.
        first_expert: the id of this rank's first expert.

    Returns:
        [T, in] in the dtype of x.
    """
    out = torch.zeros_like(x)
    for expert in range(gate_up.matrix.shape[0]):
        result = product(gated(product(x, _of(gate_up, expert)), alpha, limit), _of(down, expert))
        share = torch.where(expert_ids == first_expert + expert, expert_weights, 0).sum(dim=1, keepdim=True).to(x.dtype)
        out = out + result * share
    return out
