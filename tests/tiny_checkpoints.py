"""Tiny random checkpoints in the Hugging Face layout, written without specgraph's own code."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

VOCAB, DRAFT_VOCAB, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 96, 40, 32, 48, 4, 2, 8, 4


def write_target(folder: Path, *, vocab: int = VOCAB, max_position: int = 128, seed: int = 0) -> Path:
    """A Llama target of 4 layers with all weights random."""
    g = torch.Generator().manual_seed(seed)
    tensors = {"model.embed_tokens.weight": _random(g, vocab, HIDDEN, scale=0.6)}
    tensors["model.norm.weight"] = _norm(g, HIDDEN)
    tensors["lm_head.weight"] = _random(g, vocab, HIDDEN, scale=0.4)
    for i in range(LAYERS):
        tensors |= _layer(g, f"model.layers.{i}.", HIDDEN, ("input_layernorm",))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "num_hidden_layers": LAYERS,
        "max_position_embeddings": max_position,
        "tie_word_embeddings": False,
        **_shape(),
    }
    return _write(folder, config, tensors)


def write_eagle3(
    folder: Path, *, vocab: int = VOCAB, draft_vocab: int = DRAFT_VOCAB, layers: int = 1, seed: int = 1
) -> Path:
    """An EAGLE-3 head for that target in its authors' layout, with a reduced vocabulary."""
    assert layers == 1, "the authors' layout has one layer"
    g = torch.Generator().manual_seed(seed)
    tensors = _layer(g, "midlayer.", 2 * HIDDEN, ("input_layernorm", "hidden_norm"))
    tensors["norm.weight"] = _norm(g, HIDDEN)
    tensors["fc.weight"] = _random(g, HIDDEN, 3 * HIDDEN)
    tensors["lm_head.weight"] = _random(g, draft_vocab, HIDDEN, scale=0.4)
    chosen = torch.randperm(vocab, generator=g)[:draft_vocab].sort().values
    tensors["d2t"] = chosen - torch.arange(draft_vocab)
    tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, chosen, True)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": vocab,
        "draft_vocab_size": draft_vocab,
        "target_hidden_size": HIDDEN,
        "num_hidden_layers": 1,
        "max_position_embeddings": 128,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
        **_shape(),
    }
    return _write(folder, config, tensors)


def write_eagle(folder: Path, *, vocab: int = VOCAB, seed: int = 2) -> Path:
    """An EAGLE-1 head for that target: its first layer has no input norm."""
    g = torch.Generator().manual_seed(seed)
    tensors = _layer(g, "layers.0.", HIDDEN, ())
    tensors |= {"fc.weight": _random(g, HIDDEN, 2 * HIDDEN), "fc.bias": _random(g, HIDDEN)}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "num_hidden_layers": 1,
        "max_position_embeddings": 128,
        **_shape(),
    }
    return _write(folder, config, tensors)


def _shape() -> dict[str, object]:
    return {
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "torch_dtype": "float32",
        "hidden_act": "silu",
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def _layer(g: torch.Generator, prefix: str, inputs: int, norms: tuple[str, ...]) -> dict[str, Tensor]:
    tensors = {
        "self_attn.q_proj.weight": _random(g, HEADS * HEAD_DIM, inputs),
        "self_attn.k_proj.weight": _random(g, KV_HEADS * HEAD_DIM, inputs),
        "self_attn.v_proj.weight": _random(g, KV_HEADS * HEAD_DIM, inputs),
        "self_attn.o_proj.weight": _random(g, HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj.weight": _random(g, INNER, HIDDEN),
        "mlp.up_proj.weight": _random(g, INNER, HIDDEN),
        "mlp.down_proj.weight": _random(g, HIDDEN, INNER),
    }
    for norm in (*norms, "post_attention_layernorm"):
        tensors[f"{norm}.weight"] = _norm(g, HIDDEN)
    return {prefix + name: tensor for name, tensor in tensors.items()}


def _random(g: torch.Generator, *shape: int, scale: float = 0.25) -> Tensor:
    return torch.randn(*shape, generator=g) * scale


def _norm(g: torch.Generator, size: int) -> Tensor:
    return 1 + torch.randn(size, generator=g) * 0.2


def _write(folder: Path, config: dict[str, object], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder
