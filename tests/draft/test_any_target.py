"""Heads for targets that are not built here: their shape comes from a folder, a state dict or a module."""

from __future__ import annotations

import json

import pytest
import tiny_checkpoints
import torch
from safetensors.torch import save_file
from specgraph_models import load_drafter, load_target
from specgraph_models.checkpoints import TargetShape, target_shape
from specgraph_models.errors import CheckpointError
from specgraph_run import shipped_pair

from specgraph import DraftConfig, Drafter, allocate_caches
from specgraph.cpu import CpuPlatform
from specgraph.errors import ConfigError


@pytest.fixture(scope="module")
def mixture():
    """A random Qwen3 mixture of experts, of the sizes of `tiny_checkpoints`."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = transformers.Qwen3MoeConfig(
        vocab_size=tiny_checkpoints.VOCAB, hidden_size=tiny_checkpoints.HIDDEN, intermediate_size=48,
        moe_intermediate_size=24, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        num_experts=6, num_experts_per_tok=2, max_position_embeddings=128, initializer_range=0.2,
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config).eval()


@pytest.fixture(scope="module")
def head_folder(tmp_path_factory):
    return tiny_checkpoints.write_eagle3(tmp_path_factory.mktemp("head"))


def same_head(one, other) -> bool:
    ours, theirs = one.weights(), other.weights()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_every_source_gives_the_same_head(tmp_path, head_folder):
    transformers = pytest.importorskip("transformers")
    folder = tiny_checkpoints.write_target(tmp_path)
    expected = load_drafter(head_folder, load_target(folder))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert same_head(load_drafter(head_folder, folder), expected)
    assert same_head(load_drafter(head_folder, str(folder)), expected)
    assert same_head(load_drafter(head_folder, model), expected)
    from_tensors = load_drafter(head_folder, target_shape(model.state_dict(), max_model_len=128))
    assert same_head(from_tensors, expected)
    assert from_tensors.weights()["embed_tokens"].data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_a_target_of_several_modalities(mixture, tmp_path):
    """The language model's sizes are in `text_config`, its tensors below `language_model`."""
    mixture.save_pretrained(tmp_path / "plain")
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "some_vl", "text_config": config}))
    state = {f"model.language_model.{n.removeprefix('model.')}": t for n, t in mixture.state_dict().items()}
    save_file({n: t.contiguous() for n, t in state.items()}, tmp_path / "model.safetensors")
    shape = target_shape(tmp_path, max_model_len=64)
    assert (shape.num_layers, shape.hidden_size, shape.vocab_size, shape.max_model_len) == (4, 32, 96, 64)
    assert torch.equal(shape.lm_head, mixture.lm_head.weight)


def test_a_target_that_does_not_say_enough_is_refused(mixture, head_folder):
    state = mixture.state_dict()
    with pytest.raises(ConfigError, match="give max_model_len"):
        target_shape(state)
    with pytest.raises(CheckpointError, match=r"0 tensors named like lm_head\.weight.*under 'lm_head.weight' too"):
        target_shape({name: t for name, t in state.items() if name != "lm_head.weight"}, max_model_len=64)
    with pytest.raises(CheckpointError, match=r"Linear lacks config, get_input_embeddings"):
        load_drafter(head_folder, torch.nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match=r"embedding has shape \[4, 2\]"):
        TargetShape(num_layers=1, max_model_len=8, embed_tokens=torch.zeros(4, 2), lm_head=torch.zeros(5, 2))
    with pytest.raises(ConfigError, match="max_model_len must be at least 1, got 0"):
        TargetShape(num_layers=1, max_model_len=0, embed_tokens=torch.zeros(4, 2), lm_head=torch.zeros(4, 2))


def test_a_dtype_that_shared_tensors_lack_is_refused():
    """The head's weights would be float32, and the embedding that it shares float16."""
    target, draft = shipped_pair()
    with pytest.raises(
        ConfigError, match=r"dtype torch.float32 shares 'embed_tokens' .* torch.float16: leave dtype out"
    ):
        load_drafter(draft, load_target(target), dtype=torch.float32)
    assert load_drafter(draft, target, dtype=torch.float32).dtype == torch.float32  # a folder is read in that dtype


def test_a_head_for_another_target_is_refused(mixture, tmp_path):
    folder = tiny_checkpoints.write_eagle3(tmp_path, vocab=80)
    with pytest.raises(CheckpointError, match="vocabulary 80, the target has 96"):
        load_drafter(folder, mixture)


def test_more_positions_than_the_head_has_are_refused(mixture, head_folder):
    head, config = (
        load_drafter(head_folder, mixture),
        DraftConfig(num_speculative_tokens=2, max_num_requests=1, max_model_len=129, block_size=16),
    )
    caches = allocate_caches(head.attention_layers, 10, 16, head.dtype, torch.device("cpu"))
    with pytest.raises(ConfigError, match="max_model_len is 129, and the drafter was loaded for 128"):
        Drafter(head, caches, CpuPlatform(), config)
