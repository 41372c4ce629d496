"""Tiny random targets of many architectures, of the sizes of `tiny_checkpoints`, and prompts for them."""

from __future__ import annotations

import torch
import transformers
from torch import Tensor

VOCAB, PAD = 12, 11
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
WINDOW = 6
EXPERTS = {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2}
LATENT = {
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_key_value_heads": 4,
    "head_dim": 4,
}
ARCHITECTURES = {
    "Llama": {},
    "Qwen3": {},
    "Qwen3Moe": EXPERTS,
    "Mistral": {"sliding_window": WINDOW},
    "Gemma3": {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "Olmo2": {},
    "GPTNeoX": {"rotary_pct": 0.5},
    "GPT2": {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_inner": 48, "n_positions": 128},
    "Bloom": {"n_layer": 4, "n_head": 4},
    "DeepseekV3": LATENT,
}
"""Sliding windows, a mixture of experts, latent attention, learned positions, and no positions at all (ALiBi)."""
SEEDS = {
    "Llama": 8,
    "Qwen3": 8,
    "Qwen3Moe": 7,
    "Mistral": 7,
    "Gemma3": 6,
    "Olmo2": 6,
    "GPTNeoX": 6,
    "GPT2": 7,
    "Bloom": 5,
}
"""With which the random head of `conftest` is right now and then."""


def make_target(architecture: str, **changes) -> torch.nn.Module:
    """A random float64 model, so that no two logits are nearly equal by rounding."""
    torch.manual_seed(SEEDS.get(architecture, 8))
    named = "Gemma3Text" if architecture == "Gemma3" else architecture
    config = getattr(transformers, f"{named}Config")(**{**SIZES, **ARCHITECTURES[architecture], **changes})
    model = getattr(transformers, f"{architecture}{'LMHeadModel' if architecture == 'GPT2' else 'ForCausalLM'}")(config)
    model.set_experts_implementation("eager")  # the grouped one takes no float64
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3) if parameter.dim() > 1 else parameter.add_(torch.randn_like(parameter) / 4)
    return model.double().eval()


def make_prompts(*lengths: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Random prompts, padded on the left: input_ids and attention_mask."""
    generator = torch.Generator().manual_seed(seed)
    columns = max(lengths)
    ids = torch.randint(0, PAD, (len(lengths), columns), generator=generator)
    mask = torch.arange(columns) >= columns - torch.tensor(lengths)[:, None]
    return ids.masked_fill(~mask, PAD), mask.long()
