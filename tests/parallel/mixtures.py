"""Tiny mixtures of experts with random weights, written by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SIZES: dict[str, Any] = {
    "vocab_size": 120, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "num_experts_per_tok": 2, "pad_token_id": 0,
}  # fmt: skip
MIXTURES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_experts": 8, "moe_intermediate_size": 24, "head_dim": 8, "norm_topk_prob": True},
    "GptOss": {"num_local_experts": 4, "head_dim": 8},
    "DeepseekV3": {
        "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 10, "qk_rope_head_dim": 8, "qk_nope_head_dim": 6,
        "v_head_dim": 14, "n_routed_experts": 8, "moe_intermediate_size": 24, "n_group": 2, "topk_group": 1,
        "first_k_dense_replace": 1, "num_mtp_layers": 0,
    },
}  # fmt: skip


def write_mixture(architecture: str, folder: Path) -> str:
    """Weights of every kind matter: norms and biases are random too."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{architecture}Config")(**(SIZES | MIXTURES[architecture]))
    model = getattr(transformers, f"{architecture}ForCausalLM")(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2) if parameter.dim() > 1 else parameter.add_(torch.randn_like(parameter) / 4)
    model.save_pretrained(folder)
    return str(folder)
