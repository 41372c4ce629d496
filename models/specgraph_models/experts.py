"""Mixtures of experts in place of a layer's MLP: the router, the experts that it chooses, and the shared expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from specgraph import ops
from specgraph.ops.linear import Weight
from specgraph_models import ops as model_ops
from specgraph_models.parallel import WHOLE, TensorParallel
from specgraph_models.split import add_experts, all_rows

Scoring = Literal["softmax", "sigmoid", "softmax of the chosen"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The sizes of a mixture, the layers that have it, and how its router scores experts."""

    num_experts: int
    top_k: int
    """Experts per row."""
    inner: int
    """Intermediate size of one expert."""
    layers: tuple[bool, ...]
    """A flag per layer of the model: whether it has the mixture."""
    scoring: Scoring = "softmax"
    """The function from router logits to weights: a softmax over all experts, a sigmoid for each (DeepSeek), or a
    softmax over the chosen experts (gpt-oss)."""
    normalised: bool = True
    """The weights of the chosen experts are divided by their sum."""
    scale: float = 1.0
    """Factor on the weights of the routed experts."""
    num_groups: int = 1
    """Groups of experts. Only experts of the best `top_groups` groups may be chosen (DeepSeek)."""
    top_groups: int = 1
    shared_inner: int = 0
    """Intermediate size of the shared expert, an MLP that every row goes through. 0 if there is none."""
    shared_gated: bool = False
    """A gate per row multiplies the shared expert's output (Qwen3-Next)."""
    alpha: float = 1.0
    limit: float = 0.0
    """alpha and limit choose the activation; see `specgraph_models.ops.experts.gated`."""


@dataclass(frozen=True, slots=True)
class Experts:
    """Router and shared expert of one layer. The routed experts are the layer's stacked `gate_up` and `down`."""

    config: ExpertsConfig
    router: Tensor
    """[num_experts, hidden_size]"""
    router_bias: Tensor | None = None
    """[num_experts]"""
    correction: Tensor | None = None
    """float32 [num_experts]: added to the scores that choose experts, but not to the experts' weights (DeepSeek)."""
    shared_gate_up: Tensor | None = None
    """[2 * shared_inner, hidden_size]"""
    shared_down: Tensor | None = None
    """[hidden_size, shared_inner]"""
    shared_gate: Tensor | None = None
    """[1, hidden_size]"""


def route(x: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
    """Choose experts for rows x [T, hidden_size]. Return ids, int64 [T, top_k], and weights, float32 [T, top_k]."""
    config = experts.config
    if config.scoring == "sigmoid":
        scores = functional.linear(x.float(), experts.router.float()).sigmoid()
        choice = scores if experts.correction is None else scores + experts.correction
        if config.num_groups > 1:
            choice = _within_best_groups(choice, config)
        ids = choice.topk(config.top_k, dim=-1).indices
        weights = scores.gather(1, ids)
    elif config.scoring == "softmax":
        weights, ids = functional.linear(x, experts.router).softmax(-1, torch.float32).topk(config.top_k, dim=-1)
    else:
        logits, ids = functional.linear(x, experts.router, experts.router_bias).topk(config.top_k, dim=-1)
        return ids, logits.softmax(-1, torch.float32)
    if config.normalised:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return ids, weights * config.scale


def _within_best_groups(choice: Tensor, config: ExpertsConfig) -> Tensor:
    """Return scores [T, num_experts], -inf outside the best groups. A group's score is the sum of its two best."""
    groups = choice.view(choice.shape[0], config.num_groups, -1)
    best = groups.topk(min(2, groups.shape[2]), dim=-1).values.sum(dim=-1).topk(config.top_groups, dim=-1).indices
    kept = torch.zeros(groups.shape[:2], dtype=torch.bool, device=choice.device).scatter_(1, best, True)
    return groups.masked_fill(~kept[..., None], float("-inf")).view_as(choice)


def mixture(x: Tensor, experts: Experts, gate_up: Weight, down: Weight, ranks: TensorParallel = WHOLE) -> Tensor:
    """Run normalised rows x [T, hidden_size] through the chosen experts and the shared one. Return [T, hidden_size].

    gate_up and down are stacked by expert, as in `model_ops.expert_mlp`. They are this rank's experts, or this rank's
    columns of all experts. The router and the shared expert are whole on every rank.
    """
    config, own, rows = experts.config, ranks.experts, all_rows(x, ranks)
    ids, weights = route(rows, experts)
    first = 0 if own is None else own.part(config.num_experts)[0]
    if own is None and ranks.rank:
        down = down._replace(bias=None)  # only the first rank adds the bias
    out = model_ops.expert_mlp(rows, ids, weights, gate_up, down, config.alpha, config.limit, first_expert=first)
    out = add_experts(out, ranks)
    if experts.shared_gate_up is None or experts.shared_down is None:
        return out
    inner = model_ops.norm_gate_up(x, None, Weight(experts.shared_gate_up))
    if experts.shared_gate is None:
        return ops.norm_linear(inner, None, Weight(experts.shared_down), out)
    shared = ops.norm_linear(inner, None, Weight(experts.shared_down))
    return out + torch.sigmoid(functional.linear(x, experts.shared_gate)) * shared
