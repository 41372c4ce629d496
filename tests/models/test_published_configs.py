"""Configurations with the keys that common models' have, at small sizes: none is refused, and none of the keys is
unknown."""

import logging

import pytest
import tiny_checkpoints
import torch
from changed_folders import change_config, change_tensors
from specgraph_models.checkpoints import load_drafter, load_target

LLAMA3_ROPE = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    "rope_type": "llama3",
}  # fmt: skip
YARN = {"factor": 4.0, "original_max_position_embeddings": 32, "type": "yarn"}
COMMON = {
    "attention_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02, "pretraining_tp": 1,
    "tie_word_embeddings": False, "transformers_version": "4.43.0.dev0", "use_cache": True, "pad_token_id": 0,
    "eos_token_id": [1, 2, 3], "_name_or_path": "somebody/something",
}  # fmt: skip


def biases(tensors):
    for layer in range(4):
        for name, size in (("q", 32), ("k", 16), ("v", 16)):
            tensors[f"model.layers.{layer}.self_attn.{name}_proj.bias"] = torch.randn(size)


def head_norms(tensors):
    for layer in range(4):
        tensors |= {f"model.layers.{layer}.self_attn.{name}_norm.weight": torch.ones(8) for name in "qk"}


def buffers(tensors):
    tensors |= {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(4) for layer in range(4)}


def tied(tensors):
    del tensors["lm_head.weight"]


TARGETS = {
    "Llama-2": ({"rope_scaling": None}, buffers),
    "Llama-3.1": ({"rope_scaling": LLAMA3_ROPE, "rope_theta": 500000.0, "mlp_bias": False}, dict),
    "Llama-3.2": ({"rope_scaling": LLAMA3_ROPE, "tie_word_embeddings": True, "head_dim": 8}, tied),
    "SmolLM2": ({"is_llama_config": True, "rope_interleaved": False, "rope_theta": 130000}, dict),
    "Mistral-v0.3": ({"model_type": "mistral", "sliding_window": None, "rope_theta": 1000000.0}, dict),
    "Qwen2.5": (
        {"model_type": "qwen2", "max_window_layers": 28, "sliding_window": 131072, "use_sliding_window": False},
        biases,
    ),
    "Qwen2.5, yarn": (
        {"model_type": "qwen2", "rope_scaling": YARN},
        biases,
    ),
    "Qwen3": ({"model_type": "qwen3", "max_window_layers": 36, "sliding_window": None}, head_norms),
    "Qwen3, transformers 5": (
        {
            "model_type": "qwen3", "layer_types": ["full_attention"] * 4, "dtype": "bfloat16",
            "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
        },
        head_norms,
    ),
}  # fmt: skip

HEADS = {
    "yuhuili/EAGLE3": {"eagle_config": None, "target_hidden_size": None},
    "SpecForge": {
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 1, 3], "use_aux_hidden_state": True},
        "target_model_type": "llama",
    },
    "ModelOpt": {
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [1, 2, 3], "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False,
            "next_layer_regular": True, "parallel_draft_step": 1, "parallel_draft_heads_num_layers": 1,
            "has_lm_head": True,
        },
        "num_eagle_features": 3,
    },
    "ids at the top level": {"eagle_config": None, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
}  # fmt: skip


@pytest.mark.parametrize(("values", "tensors"), TARGETS.values(), ids=TARGETS)
def test_target(values, tensors, tmp_path, caplog):
    folder = tiny_checkpoints.write_target(tmp_path)
    change_config(folder, **{**COMMON, **values})
    change_tensors(folder, tensors)
    with caplog.at_level(logging.WARNING, "specgraph"):
        load_target(folder)
    assert not caplog.records


@pytest.mark.parametrize("values", HEADS.values(), ids=HEADS)
def test_eagle3_head(values, tmp_path, caplog):
    target = load_target(tiny_checkpoints.write_target(tmp_path / "target"))
    folder = tiny_checkpoints.write_eagle3(tmp_path / "head")
    change_config(folder, **{**COMMON, **values})
    with caplog.at_level(logging.WARNING, "specgraph"):
        load_drafter(folder, target)
    assert not caplog.records
