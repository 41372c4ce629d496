"""Targets of every architecture through our decoder: the greedy tokens are those of transformers, in every lowering."""

from __future__ import annotations

import pytest
import torch

from specgraph.attention import AttentionBackend, PagedAttention, PagedHostAttention
from specgraph.checkpoints import load_target
from specgraph.device.cpu import CpuPlatform
from specgraph.engine import EngineConfig, Request, SpeculativeDecoder
from specgraph.models.draft_model import DraftModelHead

TARGETS = {
    "mistral, window": ("Mistral", {"sliding_window": 10}),
    "qwen3, windows by layer": (
        "Qwen3",
        {
            "sliding_window": 7,
            "use_sliding_window": True,
            "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
        },
    ),
}
TARGETS |= {
    "qwen3 moe": ("Qwen3Moe", {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    "phi3": ("Phi3", {"sliding_window": 11}),
    "glm-4 moe": (
        "Glm4Moe",
        {"head_dim": 8, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 2},
    ),
    "gpt-oss": ("GptOss", {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6}),
    "gemma 3": (
        "Gemma3",
        {
            "head_dim": 8,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 3],
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
}
TARGETS["deepseek-v3"] = (
    "DeepseekV3",
    {
        "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 10, "qk_rope_head_dim": 8, "qk_nope_head_dim": 6,
        "v_head_dim": 14, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 2,
        "topk_group": 1, "first_k_dense_replace": 2, "num_mtp_layers": 0,
    },
)  # fmt: skip
LENGTHS, TOKENS = (3, 21), 16


def decoded(target, prompts, lowering, attention) -> tuple[list[list[int]], float]:
    """Greedy tokens of each prompt with the target as its own drafter, so that drafts are accepted too."""
    platform = CpuPlatform()
    config = EngineConfig(num_speculative_tokens=3, max_num_requests=2, max_model_len=64, block_size=4, decode=lowering)
    head = DraftModelHead(target, target.hidden_size)
    backend: AttentionBackend = PagedHostAttention(platform) if attention == "host" else PagedAttention()
    decoder = SpeculativeDecoder(target, head, platform, config, attention=backend)
    decoder.capture()
    results = decoder.generate([Request(prompt_token_ids=prompt, max_tokens=TOKENS) for prompt in prompts])
    length = decoder.metrics.mean_acceptance_length
    decoder.close()
    platform.close()
    return [result.token_ids for result in results], length


@pytest.mark.parametrize("name", TARGETS)
@torch.inference_mode()
def test_greedy_output_is_that_of_transformers(name, tmp_path, random_model):
    architecture, config = TARGETS[name]
    model = random_model(architecture, tmp_path, **config)
    g = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, 120, (n,), generator=g) for n in LENGTHS]
    expected = [
        model.generate(p[None], max_new_tokens=TOKENS, do_sample=False, eos_token_id=None)[0, len(p) :].tolist()
        for p in prompts
    ]
    target = load_target(tmp_path, max_model_len=64)
    ways = [("eager", "device"), ("merged", "device"), ("merged", "host")]
    for lowering, attention in ways if any(not layer.is_plain for layer in target.attention_layers) else ways[:2]:
        tokens, length = decoded(target, [p.tolist() for p in prompts], lowering, attention)
        assert tokens == expected
        assert length > 3
