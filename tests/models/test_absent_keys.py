"""Keys that a target's config.json leaves out have the values that transformers' classes give them."""

import dataclasses
import json

import pytest
import torch

from specgraph.checkpoints import load_target
from specgraph.checkpoints.absent_keys import ABSENT_KEYS

EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 24}
NAMES = {
    "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe", "phi3": "Phi3",
    "mixtral": "Mixtral", "glm4_moe": "Glm4Moe", "gpt_oss": "GptOss", "gemma3_text": "Gemma3",
    "deepseek_v3": "DeepseekV3",
}  # fmt: skip
GIVEN = {
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {**EXPERTS, "num_experts": 6},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "glm4_moe": {**EXPERTS, "n_routed_experts": 8, "head_dim": 16},
    "gpt_oss": {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 8},
    "gemma3_text": {"head_dim": 8},
    "deepseek_v3": {
        **EXPERTS, "n_routed_experts": 32, "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 10,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 6, "v_head_dim": 14, "num_mtp_layers": 0,
    },
}  # fmt: skip
"""What is given besides the sizes of `random_model`, because the class's own value is too large for a test."""


@pytest.mark.parametrize("architecture", NAMES)
def test_values_are_those_of_the_class(architecture):
    transformers = pytest.importorskip("transformers")
    name = {"gemma3_text": "Gemma3Text"}.get(architecture, NAMES[architecture])
    chosen = getattr(transformers, f"{name}Config")
    defaults = {field.name: field.default for field in dataclasses.fields(chosen)} | {
        "rope_theta": chosen.default_theta
    }
    assert ABSENT_KEYS[architecture] == {key: defaults[key] for key in ABSENT_KEYS[architecture]}


@pytest.mark.parametrize("rope", [False, True], ids=["as the class", "old keys for the rotation, null"])
@pytest.mark.parametrize("architecture", NAMES)
@torch.no_grad()
def test_a_folder_with_nothing_but_sizes(architecture, rope, tmp_path, random_model, dense_attend):
    config = GIVEN.get(architecture, {}) | ({"rope_theta": 500.0, "rope_scaling": None} if rope else {})
    model = random_model(NAMES[architecture], tmp_path, **config)
    written = json.loads((tmp_path / "config.json").read_text())
    sizes = (
        "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "max_position_embeddings",
    )  # fmt: skip
    kept = {key: written[key] for key in sizes} | config
    (tmp_path / "config.json").write_text(json.dumps(kept))
    tokens = torch.randint(0, 120, (100,), generator=torch.Generator().manual_seed(1))

    target = load_target(tmp_path)
    out = target.forward(tokens, dense_attend(target.attention_layers, torch.arange(100)))
    torch.testing.assert_close(target.logits(out.hidden), model(tokens[None]).logits[0], rtol=0, atol=1e-4)
