"""The scripts of this folder share this: the engines, their versions, and folders of 8B shapes."""

from __future__ import annotations

import importlib
import json
import platform
import tempfile
from pathlib import Path
from typing import Any

import torch

ENGINES = ("vllm", "sglang")

LLAMA3_8B: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "vocab_size": 128256, "max_position_embeddings": 8192, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "attention_bias": False, "mlp_bias": False, "bos_token_id": 128000, "eos_token_id": 128001,
}  # fmt: skip
"""Llama 3 8B, published."""
EAGLE3: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 32000,
}  # fmt: skip
"""Keys that the drafter's config.json has besides."""


def engine_class(name: str) -> Any:
    """`Engine` of vllm_engine.py or sglang_engine.py: they have the same methods."""
    return importlib.import_module(f"{name}_engine").Engine


def environment(name: str) -> dict[str, str]:
    """Versions and the GPU, for a result file."""
    versions = {module: importlib.import_module(module).__version__ for module in (name, "torch", "triton")}
    return versions | {"python": platform.python_version(), "gpu": torch.cuda.get_device_name()}


def config_folder(name: str, **changes: Any) -> str:
    """A checkpoint folder of Llama 3 8B's shape, with changes and nothing but a configuration."""
    path = Path(tempfile.mkdtemp()) / name
    path.mkdir()
    (path / "config.json").write_text(json.dumps(LLAMA3_8B | changes))
    return str(path)
