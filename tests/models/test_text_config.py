"""Folders of several modalities, read as their text model: logits against transformers' own whole model."""

import logging
import os

import pytest
import torch
from changed_folders import change_config, change_tensors, refused
from specgraph_models.checkpoints import drafter_format, load_target, target_shape
from specgraph_models.checkpoints.tokens import stop_token_ids
from specgraph_run.text.chat_template import refuse_pictures

from specgraph.errors import ConfigError

VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip
TEXT = {
    "vocab_size": 120, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "head_dim": 8, "eos_token_id": 7, "dtype": "float32",
}  # fmt: skip
FOLDERS = {
    "gemma3": ("Gemma3", {"text_config": {**TEXT, "sliding_window": 6}, "mm_tokens_per_image": 4}),
    "mistral3": ("Mistral3", {"text_config": {**TEXT, "model_type": "mistral"}}),
}
NEWER = {"language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head.", "": "model."}


@pytest.fixture
def written(tmp_path):
    """`written(kind)`: a random model of several modalities, saved."""
    transformers = pytest.importorskip("transformers")

    def write(kind):
        name, config = FOLDERS[kind]
        torch.manual_seed(0)
        settings = getattr(transformers, f"{name}Config")(vision_config=VISION, **config)
        settings._attn_implementation = "eager"
        model = getattr(transformers, f"{name}ForConditionalGeneration")(settings).float().eval()
        model.save_pretrained(tmp_path)
        return model

    return write


def in_newer_names(tensors):
    for name in list(tensors):
        first = next(prefix for prefix in NEWER if name.startswith(prefix))
        tensors[NEWER[first] + name.removeprefix(first)] = tensors.pop(name)


@pytest.mark.parametrize("kind", FOLDERS if os.environ.get("SPECGRAPH_HYBRID_CONFIGS") else ["gemma3"])
@torch.no_grad()
def test_logits_are_those_of_the_whole_model(kind, written, tmp_path, dense_attend, caplog):
    model, tokens = written(kind), torch.arange(3, 60)
    with caplog.at_level(logging.WARNING, "specgraph"):
        for change in (dict, in_newer_names):
            change_tensors(tmp_path, change)
            target = load_target(tmp_path)
            out = target.forward(tokens, dense_attend(target.attention_layers, torch.arange(57)))
            expected = model(tokens[None]).logits[0]
            torch.testing.assert_close(target.logits(out.hidden), expected, rtol=0, atol=1e-4)
    assert ["tensors of pictures and sound" in record.message for record in caplog.records] == [True, True]
    assert target_shape(tmp_path).embed_tokens.equal(target.embed_tokens)
    assert drafter_format(tmp_path).algorithm == "draft_model"
    change_config(tmp_path, eos_token_id=None)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    assert stop_token_ids(tmp_path, 120) == (7,)


def test_what_is_refused(written, tmp_path):
    """Another folder of several modalities; pictures in a prompt."""
    written("mistral3")
    change_config(tmp_path, model_type="some_vl")
    with refused("'model_type' is 'some_vl'", "text_config", "gemma3, "):
        load_target(tmp_path)
    parts = [{"type": "text", "text": "what is it?"}, {"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(ConfigError, match="message 0 has a part of type image: only text is read"):
        refuse_pictures([{"role": "user", "content": parts}])


@torch.no_grad()
def test_norms_of_one_plus_weight_are_added_in_float32(tmp_path, random_model, dense_attend):
    """In bfloat16 the sum would be off by up to 3.9e-3."""
    model = random_model("Gemma3", tmp_path, head_dim=8, num_hidden_layers=1).bfloat16()
    model.save_pretrained(tmp_path)
    target = load_target(tmp_path)
    weight = model.model.norm.weight.float()
    assert target.norm.dtype == torch.float32
    assert target.norm.equal(weight + 1)
    tokens = torch.arange(3, 40)
    expected = model(tokens[None], output_hidden_states=True).hidden_states[-1][0]
    hidden = target.forward(tokens, dense_attend(target.attention_layers, torch.arange(37))).hidden
    torch.testing.assert_close(hidden, expected, rtol=0.02, atol=0.02)
