"""The original context length of a scaled rotation, wherever config.json has it, against transformers' frequencies."""

import json

import pytest
import torch
from specgraph_models.checkpoints.config_source import read_config
from specgraph_models.checkpoints.model_config import model_config
from specgraph_models.rotary import inverse_frequencies

SIZES = {
    "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 16, "vocab_size": 120, "max_position_embeddings": 512, "pad_token_id": 0,
}  # fmt: skip
KINDS = {
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 4.0},
    "longrope": {"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]},
}
LENGTH = "original_max_position_embeddings"


ANYWHERE, OF_ITS_KIND = ("", "top", "section", "top section"), ("section", "top section")
CASES = [
    ("llama", "rope_parameters", "llama3", ANYWHERE), ("llama", "rope_scaling", "yarn", ANYWHERE),
    ("gpt_oss", "rope_parameters", "yarn", ANYWHERE), ("phi3", "rope_scaling", "longrope", ANYWHERE),
    ("gemma3_text", "by kind", "yarn", OF_ITS_KIND), ("gemma3_text", "rope_scaling", "yarn", OF_ITS_KIND),
]  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "key", "kind", "places"), [(*case, each) for *case, places in CASES for each in places]
)
def test_frequencies_are_those_of_transformers(architecture, key, kind, places, tmp_path):
    transformers = pytest.importorskip("transformers")
    rope_functions = pytest.importorskip("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
    scaling = {"rope_type": kind, **KINDS[kind], **({LENGTH: 64} if "section" in places else {})}
    rope = {
        "rope_parameters": {"rope_parameters": {**scaling, "rope_theta": 1000.0}},
        "rope_scaling": {"rope_scaling": scaling, "rope_theta": 1000.0},
        "by kind": {
            "rope_parameters": {
                "full_attention": {**scaling, "rope_theta": 1000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            }
        },
    }[key]
    top = {LENGTH: 128} if "top" in places else {}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": architecture, **SIZES, **rope, **top}))

    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    layers = "full_attention" if architecture == "gemma3_text" else None
    ours = model_config(read_config(tmp_path)).rotary
    for positions in (32, 512):
        want, factor = rope_functions[kind](theirs, torch.device("cpu"), seq_len=positions, layer_type=layers)
        torch.testing.assert_close(inverse_frequencies(ours, 16, positions), want, rtol=1e-6, atol=0)
        assert ours.attention_factor == pytest.approx(factor)
