"""The architectures that are read, one row of a table each, with the facts that config.json leaves out.

An absent key has the value that transformers' configuration class gives it. The table has a key only if a reader takes
it, and only if the class's value differs from the reader's own default. Qwen3-MoE's number of experts is not in the
table: a file may store it under either of two names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from specgraph_models.checkpoints.config_source import ConfigSource


@dataclass(frozen=True, slots=True)
class Architecture:
    """One row of the table."""

    absent_keys: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The values of keys that config.json leaves out."""
    model: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Fields of `ModelConfig` that every model of the architecture has."""
    switches: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Boolean keys that the class in transformers reads -> the fields of `ModelConfig` that each sets."""
    sliding: Literal["never", "every layer", "some layers"] = "every layer"
    """The layers that have a `sliding_window` if `layer_types` is absent."""
    by_layer: bool = False
    """True if transformers reads `layer_types` of a whole model. It loads such a Mistral as a Ministral."""
    full_every: int | None = None
    """Every n-th layer has full attention, unless the configuration sets another n. None if there is no such rule."""
    partly_rotated: bool = False
    """True if `partial_rotary_factor` may be less than 1: a share of each head is then rotated."""
    hybrid: bool = False
    """True if layers of the target may be recurrent, with linear attention. Its MTP modules have full attention."""

    @property
    def always(self) -> Mapping[str, bool]:
        """Keys that are refused in other architectures, with the value that every model of this one has."""
        return {key: True for name, keys in _SAID_BY.items() if self.model.get(name) for key in keys}


_SAID_BY = {
    "qk_norm": ("use_qk_norm", "qk_layernorm"),
    "whole_qk_norm": ("use_qk_norm",),
    "norm_offset": ("use_gemma_norm",),
}
"""Field of `ModelConfig` -> the keys of `NEUTRAL` that set it."""

OF_TENSORS = ("attention_bias", "mlp_bias", "qkv_bias", "shared_expert_intermediate_size")
"""Keys that only tell which tensors each layer has. They may be left unread if the architecture's class lacks them: a
tensor that the architecture does not have is refused anyway."""

_BIASES = {"attention_bias": ("qkv_bias", "output_bias")}

_QWEN = {"max_position_embeddings": 32768, "sliding_window": 4096}
_MISTRAL = {"max_position_embeddings": 131072, "num_key_value_heads": 8}

_QWEN_HYBRID = {"max_position_embeddings": 32768, "head_dim": 256, "partial_rotary_factor": 0.25}
_QWEN_HYBRID_MOE = {**_QWEN_HYBRID, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
_hybrid = partial(
    Architecture, model={"qk_norm": True, "norm_offset": 1.0}, switches=_BIASES, partly_rotated=True, hybrid=True
)

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(switches={**_BIASES, "mlp_bias": ("mlp_bias",)}, sliding="never"),
    "mistral": Architecture({**_MISTRAL, "sliding_window": 4096}, by_layer=True),
    "qwen2": Architecture(
        {**_QWEN, "num_key_value_heads": 32}, {"qkv_bias": True}, sliding="some layers", by_layer=True
    ),
    "qwen3": Architecture(
        {**_QWEN, "num_key_value_heads": 32, "head_dim": 128},
        {"qk_norm": True},
        _BIASES,
        sliding="some layers",
        by_layer=True,
    ),
    "qwen3_moe": Architecture(
        {**_QWEN, "num_key_value_heads": 4, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        {"qk_norm": True},
        _BIASES,
    ),
    "mixtral": Architecture(
        {**_MISTRAL, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2}
    ),
    "phi3": Architecture(
        {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
        {"packed_projections": True},
        partly_rotated=True,
    ),
    "glm4_moe": Architecture(
        {
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
            "first_k_dense_replace": 1,
            "partial_rotary_factor": 0.5,
        },
        switches={"attention_bias": ("qkv_bias",), "use_qk_norm": ("qk_norm",)},
        sliding="never",
        partly_rotated=True,
    ),
    "gpt_oss": Architecture(
        {
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "rope_theta": 150000.0,
            "attention_bias": True,
        },
        {"sinks": True},
        _BIASES,
        sliding="some layers",
        by_layer=True,
        full_every=2,
    ),
    "gemma3_text": Architecture(
        {"max_position_embeddings": 131072, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096},
        {"activation": "gelu_tanh", "norm_offset": 1.0, "output_norms": True, "qk_norm": True},
        _BIASES,
        sliding="some layers",
        by_layer=True,
        full_every=6,
    ),
    "deepseek_v3": Architecture(
        {
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
        sliding="never",
    ),
    "kimi_k2": Architecture(sliding="never"),
    "glm4_moe_lite": Architecture(
        {
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 202752,
            "kv_lora_rank": 512,
            "q_lora_rank": 768,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "n_routed_experts": 64,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1536,
            "routed_scaling_factor": 1.8,
        },
        sliding="never",
    ),
    "ministral3": Architecture(
        {"rms_norm_eps": 1e-5, "max_position_embeddings": 262144, "num_key_value_heads": 8, "head_dim": 128}
    ),
    "minimax_m2": Architecture(
        {
            "max_position_embeddings": 196608,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "rope_theta": 5e6,
        },
        {"whole_qk_norm": True},
        sliding="never",
        partly_rotated=True,
    ),
    "qwen3_next": _hybrid(
        {**_QWEN_HYBRID_MOE, "num_key_value_heads": 2, "num_experts": 512, "num_experts_per_tok": 10}
    ),
    "qwen3_5_text": _hybrid({**_QWEN_HYBRID, "num_key_value_heads": 4}),
    "qwen3_5_moe_text": _hybrid(
        {**_QWEN_HYBRID_MOE, "num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8}
    ),
}
"""`model_type` -> architecture."""

MTP_ARCHITECTURES: Mapping[str, Architecture] = {
    **ARCHITECTURES,
    "deepseek_v32": Architecture(
        {**ARCHITECTURES["deepseek_v3"].absent_keys, "max_position_embeddings": 163840, "index_topk": 2048},
        sliding="never",
    ),
}
"""`model_type` -> architecture, of targets whose MTP modules are read. The target itself may not be readable."""

_ABSENT_ROPE: Mapping[str, Mapping[str, Any]] = {
    "gpt_oss": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "ministral3": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "llama_4_scaling_beta": 0.1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
"""`model_type` -> the rotation of a model without a section for it, in transformers 5."""


def with_absent_keys(source: ConfigSource, architecture: str) -> ConfigSource:
    """Return `source` with its absent keys filled in, as transformers would read a model of `architecture`.

    A key that is null stays null. Rotations of `_ABSENT_ROPE` are the exception: without a section for it,
    transformers 5 takes YaRN's, but none if `rope_parameters` is empty and not null.
    A key that is taken from the result counts as taken from `source`.
    """
    values = {**MTP_ARCHITECTURES[architecture].absent_keys, **source.values}
    rope = _ABSENT_ROPE.get(architecture)
    if rope is not None and values.get("rope_parameters") is None and not values.get("rope_scaling"):
        values["rope_scaling"] = dict(rope)
    return replace(source, values=values)
