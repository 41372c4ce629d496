"""Changing copies of the tests' checkpoint folders, and expecting that they are refused."""

import json
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from specgraph_models.errors import CheckpointError

FIXTURES = Path(__file__).parent / "models/speculators_fixtures"


def change_config(folder, *path, **changes):
    config = json.loads((folder / "config.json").read_text())
    section = config
    for key in path:
        section = section.setdefault(key, {})
    section.update(changes)
    (folder / "config.json").write_text(json.dumps(config))


def keep_sizes(folder, given):
    """Leave out every key of config.json except a model's sizes and those given."""
    sizes = (
        "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "max_position_embeddings",
    )  # fmt: skip
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({key: written[key] for key in sizes} | given))


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def refused(*words, error=CheckpointError):
    """Expects an error whose message has these words in this order."""
    return pytest.raises(error, match=".*".join(re.escape(word) for word in words))
