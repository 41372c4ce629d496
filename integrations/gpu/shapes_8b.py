"""Writes folders with Llama 3 8B's shapes and no weights, for a server that makes dummy weights.

    python integrations/gpu/shapes_8b.py FOLDER [--drafter-weights]

FOLDER/target and FOLDER/drafter (EAGLE-3) get a config.json each. The target also gets a tokenizer with one word per
token id, so that prompts have the lengths that a client draws. With `--drafter-weights` the drafter gets random
weights: with dummy weights SGLang has no map from draft ids to the target's ids.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

LLAMA3_8B: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "vocab_size": 128256, "max_position_embeddings": 8192, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "attention_bias": False, "mlp_bias": False, "bos_token_id": 128000, "eos_token_id": 128001,
}  # fmt: skip
"""The published config.json of Llama 3 8B."""
EAGLE3: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 32000,
}  # fmt: skip
"""Further keys of the drafter's config.json."""


def main(folder: Path) -> None:
    """Write the folders `target` and `drafter`."""
    target = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32}
    for name, changes in (("target", target), ("drafter", EAGLE3)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(LLAMA3_8B | changes))
    words = {f"w{token}": token for token in range(LLAMA3_8B["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    tokenizer.save(str(folder / "target" / "tokenizer.json"))
    (folder / "target" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


def write_drafter_weights(folder: Path) -> None:
    """Write random weights in bfloat16, and a vocabulary map from draft id i to target id 4 * i."""
    hidden, inner, ids = LLAMA3_8B["hidden_size"], LLAMA3_8B["intermediate_size"], EAGLE3["draft_vocab_size"]
    kv = LLAMA3_8B["num_key_value_heads"] * LLAMA3_8B["head_dim"]
    attention = zip("qkvo", ((hidden, 2 * hidden), (kv, 2 * hidden), (kv, 2 * hidden), (hidden, hidden)), strict=True)
    shapes = {
        "fc": (hidden, 3 * hidden), "lm_head": (ids, hidden), "norm": (hidden,),
        **{f"midlayer.{name}norm": (hidden,) for name in ("hidden_", "input_layer", "post_attention_layer")},
        **{f"midlayer.self_attn.{name}_proj": shape for name, shape in attention},
        "midlayer.mlp.gate_proj": (inner, hidden), "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    tensors = {f"{name}.weight": torch.randn(shape, dtype=torch.bfloat16) * 0.01 for name, shape in shapes.items()}
    save_file(tensors | {"d2t": torch.arange(ids) * 3}, folder / "model.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    if "--drafter-weights" in sys.argv:
        write_drafter_weights(Path(sys.argv[1]) / "drafter")
