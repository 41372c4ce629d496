"""Reading mixtures of experts: their sizes from config.json, and the tensors of one layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specgraph.checkpoints.config_source import ConfigSource
from specgraph.checkpoints.folder import CheckpointFolder
from specgraph.models.experts import Experts, ExpertsConfig


@dataclass(frozen=True, slots=True)
class LoadedExperts:
    """A layer's mixture: `Experts`, and what the layer holds stacked by expert."""

    experts: Experts
    gate_up: Tensor
    """[num_experts, 2 * inner, hidden_size]"""
    down: Tensor
    """[num_experts, hidden_size, inner]"""


def experts_config(source: ConfigSource, architecture: str, num_layers: int) -> ExpertsConfig | None:
    """Sizes and routing of a mixture; None for an architecture without one.

    Raises:
        CheckpointError: a key that is missing, malformed or out of range.
    """
    if architecture not in ("qwen3_moe", "mixtral"):
        return None
    key = next((k for k in ("num_experts", "num_local_experts") if source.has(k)), "num_local_experts")
    num_experts, top_k = source.integer(key), source.integer("num_experts_per_tok")
    if top_k > num_experts:
        raise source.fail("num_experts_per_tok", f"is {top_k}, and there are {num_experts} experts")
    source.taken.update(("router_aux_loss_coef", "output_router_logits", "router_jitter_noise"))  # for training
    if architecture == "mixtral":
        return ExpertsConfig(
            num_experts=num_experts, top_k=top_k, inner=source.integer("intermediate_size"), layers=(True,) * num_layers
        )
    dense, every = source.integers("mlp_only_layers") or (), source.integer("decoder_sparse_step", 1)
    return ExpertsConfig(
        num_experts=num_experts,
        top_k=top_k,
        inner=source.integer("moe_intermediate_size"),
        layers=tuple(i not in dense and (i + 1) % every == 0 for i in range(num_layers)),
        normalised=source.boolean("norm_topk_prob", False),
    )


def load_experts(folder: CheckpointFolder, prefix: str, config: ExpertsConfig, hidden: int) -> LoadedExperts:
    """Read the mixture of the layer `prefix`, under the names of Mixtral or those of Qwen3 (DeepSeek, GLM).

    Raises:
        CheckpointError: a missing tensor or one of another shape.
    """
    mixtral = f"{prefix}.block_sparse_moe.gate.weight" in folder
    block = f"{prefix}.{'block_sparse_moe' if mixtral else 'mlp'}"
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    inner = [(config.inner, hidden)] * 2
    gate_up = [
        folder.stacked([f"{block}.experts.{e}.{name}.weight" for name in (gate, up)], inner)
        for e in range(config.num_experts)
    ]
    downs = [
        folder.weight(f"{block}.experts.{e}.{down}.weight", (hidden, config.inner)) for e in range(config.num_experts)
    ]
    experts = Experts(config, folder.weight(f"{block}.gate.weight", (config.num_experts, hidden)))
    return LoadedExperts(experts, torch.stack(gate_up), torch.stack(downs))
