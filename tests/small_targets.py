"""A small configuration of every architecture, for transformers to make a random model of."""

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
DEEPSEEK = {
    **EXPERTS, "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 10, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 6, "v_head_dim": 14, "n_routed_experts": 6, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 2, "num_mtp_layers": 0,
}  # fmt: skip
TARGETS = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 10}),
    "qwen2": ("Qwen2", {}),
    "qwen3": (
        "Qwen3",
        {
            "sliding_window": 7, "use_sliding_window": True,
            "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
        },
    ),
    "qwen3_moe": ("Qwen3Moe", {**EXPERTS, "num_experts": 6}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "phi3": ("Phi3", {"sliding_window": 11}),
    "glm4_moe": ("Glm4Moe", {**EXPERTS, "head_dim": 8, "n_routed_experts": 6, "n_group": 2}),
    "gpt_oss": (
        "GptOss", {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6}
    ),
    "gemma3_text": (
        "Gemma3",
        {
            "head_dim": 8, "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 3],
        },
    ),
    "deepseek_v3": ("DeepseekV3", DEEPSEEK),
}  # fmt: skip
"""`model_type` -> transformers' class, and what its configuration has besides the sizes of `random_model`."""

ALIKE = {
    "kimi_k2": "DeepseekV3",
    "glm4_moe_lite": "Glm4MoeLite",
    "ministral3": "Ministral3",
    "minimax_m2": "MiniMaxM2",
}
"""Architectures that differ from those of `TARGETS` in how they are read. The parity test has them; `kimi_k2` has no
class of its own in transformers."""
