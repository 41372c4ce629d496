"""Keys that a target's config.json leaves out have the values that transformers' classes give them."""

import copy
import dataclasses
import itertools

import pytest
import torch
from changed_folders import keep_sizes
from small_targets import TARGETS
from specgraph_models.checkpoints import load_target
from specgraph_models.checkpoints.architectures import ARCHITECTURES

EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 24}
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
"""Keys that are given besides the sizes of `random_model`: the class's own value is too large for a test."""


@pytest.mark.parametrize("architecture", TARGETS)
def test_values_are_those_of_the_class(architecture):
    transformers = pytest.importorskip("transformers")
    name = "Gemma3Text" if architecture == "gemma3_text" else TARGETS[architecture][0]
    chosen = getattr(transformers, f"{name}Config")
    defaults = {field.name: field.default for field in dataclasses.fields(chosen)} | {
        "rope_theta": chosen.default_theta,
        "partial_rotary_factor": chosen().rope_parameters.get("partial_rotary_factor"),
    }
    assert ARCHITECTURES[architecture].absent_keys == {
        key: defaults[key] for key in ARCHITECTURES[architecture].absent_keys
    }


OLD, NULL = {"rope_theta": 500.0, "rope_scaling": None}, {"partial_rotary_factor": None, "rope_parameters": {}}
PART = {"rope_theta": 500.0, "rope_scaling": {"rope_type": "default", "partial_rotary_factor": 1.0}}
OUTSIDE = {"rope_theta": 500.0, "rope_local_base_freq": 50.0, "rope_parameters": {"full_attention": {}}}


@pytest.mark.parametrize(
    ("architecture", "rope"),
    [
        *itertools.product(TARGETS, ({}, OLD)),
        ("glm4_moe", NULL),
        ("glm4_moe", PART),
        ("gpt_oss", NULL),
        ("gemma3_text", OUTSIDE),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
@torch.no_grad()
def test_a_folder_with_nothing_but_sizes(architecture, rope, tmp_path, random_model, dense_attend):
    config = GIVEN.get(architecture, {}) | rope
    model = random_model(TARGETS[architecture][0], tmp_path, **copy.deepcopy(config))
    keep_sizes(tmp_path, config)
    tokens = torch.randint(0, 120, (100,), generator=torch.Generator().manual_seed(1))

    target = load_target(tmp_path)
    out = target.forward(tokens, dense_attend(target.attention_layers, torch.arange(100)))
    torch.testing.assert_close(target.logits(out.hidden), model(tokens[None]).logits[0], rtol=0, atol=1e-4)
