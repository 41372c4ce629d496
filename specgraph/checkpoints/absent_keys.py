"""Values of keys that a target's config.json leaves out: those that transformers' configuration classes give them.

Only keys that a reader takes, and only where the class's value is not the one that the reader itself falls back on. The
number of experts of Qwen3-MoE is not among them: it is stored under either of two names.
Source: the dataclass fields and `default_theta` of each configuration class of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specgraph.checkpoints.config_source import ConfigSource

_QWEN = {"max_position_embeddings": 32768, "sliding_window": 4096}
_MISTRAL = {"max_position_embeddings": 131072, "num_key_value_heads": 8}

ABSENT_KEYS: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mistral": {**_MISTRAL, "sliding_window": 4096},
    "qwen2": {**_QWEN, "num_key_value_heads": 32},
    "qwen3": {**_QWEN, "num_key_value_heads": 32, "head_dim": 128},
    "qwen3_moe": {
        **_QWEN,
        "num_key_value_heads": 4,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "mixtral": {
        **_MISTRAL,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "phi3": {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
    "glm4_moe": {
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
    },
    "gpt_oss": {
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "rope_theta": 150000.0,
    },
    "gemma3_text": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
    },
    "deepseek_v3": {
        "max_position_embeddings": 4096,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
    },
}
"""Architecture -> key -> value."""

_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def with_absent_keys(source: ConfigSource, architecture: str) -> ConfigSource:
    """`source` with the keys that it leaves out, for a model of `architecture` as transformers would read it.

    A key that is null stays null, except the rotation of gpt-oss: with no section for it, transformers 5 takes YaRN's.
    What is taken from the result counts as taken from `source`.
    """
    values = {**ABSENT_KEYS.get(architecture, {}), **source.values}
    if architecture == "gpt_oss" and not values.get("rope_parameters") and not values.get("rope_scaling"):
        values["rope_scaling"] = _GPT_OSS_ROPE
    return replace(source, values=values)
