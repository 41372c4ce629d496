"""A DeepSeek-V3 folder in shapes that a device takes: `auto` chooses the MLA row, and graphs give eager's text."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file
from specgraph_run import load_generator, shipped_pair

LAYERS, HIDDEN, INNER, HEADS, VOCAB = 2, 64, 96, 4, 2048
QUERY_RANK, RANK, ROPE, PLAIN, VALUE = 48, 512, 64, 16, 16
CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "torch_dtype": "bfloat16",
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "max_position_embeddings": 256,
    "q_lora_rank": QUERY_RANK, "kv_lora_rank": RANK, "qk_rope_head_dim": ROPE, "qk_nope_head_dim": PLAIN,
    "v_head_dim": VALUE, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "first_k_dense_replace": LAYERS, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0,
    "norm_topk_prob": True, "num_nextn_predict_layers": 0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
MATRICES = {
    "self_attn.q_a_proj": (QUERY_RANK, HIDDEN),
    "self_attn.q_b_proj": (HEADS * (PLAIN + ROPE), QUERY_RANK),
    "self_attn.kv_a_proj_with_mqa": (RANK + ROPE, HIDDEN),
    "self_attn.kv_b_proj": (HEADS * (PLAIN + VALUE), RANK),
    "self_attn.o_proj": (HIDDEN, HEADS * VALUE),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
OPTIONS = {"num_speculative_tokens": 3, "dtype": "float16"}  # MLA takes it, and fewer logits tie than in bfloat16
NORMS = {
    "self_attn.q_a_layernorm": QUERY_RANK,
    "self_attn.kv_a_layernorm": RANK,
    "input_layernorm": HIDDEN,
    "post_attention_layernorm": HIDDEN,
}


@pytest.fixture
def folder(tmp_path):
    """All layers dense, weights random."""
    g = torch.Generator().manual_seed(4)
    sizes = {f"model.layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in MATRICES.items()}
    sizes |= {f"model.layers.{i}.{name}": (size,) for i in range(LAYERS) for name, size in NORMS.items()}
    sizes |= {"model.embed_tokens": (VOCAB, HIDDEN), "lm_head": (VOCAB, HIDDEN), "model.norm": (HIDDEN,)}
    tensors = {
        f"{name}.weight": (torch.randn(shape, generator=g) * 0.2 + (len(shape) == 1)).to(torch.bfloat16)
        for name, shape in sizes.items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    shutil.copy(shipped_pair()[0] / "tokenizer.json", tmp_path)
    return tmp_path


def test_a_latent_target_and_drafter_from_a_folder(npu, runtime, all_limits, folder):
    """The target drafts for itself, so that drafts are accepted too."""
    seen = {}
    for lowering in ("eager", "merged"):
        made = load_generator(folder, folder, platform=npu, decode=lowering, **OPTIONS)
        attention = made.decoder.target.attention
        assert attention.name == made.decoder.drafter.attention.name == "fia-mla"
        seen[lowering] = made.text(["import os"], max_tokens=20)
        assert made.decoder.metrics.mean_acceptance_length > 3
        made.close()
    on_cpu = load_generator(folder, folder, platform="cpu", **OPTIONS)
    seen["cpu"] = on_cpu.text(["import os"], max_tokens=20)
    on_cpu.close()
    assert all(text == seen["eager"] and text[0] for text in seen.values()), seen
