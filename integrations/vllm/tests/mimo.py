"""The shipped target and its MTP drafter as one folder in MiMo's layout, which is what vLLM's `mtp` serves dense.

    python integrations/vllm/tests/mimo.py OUT

MiMo's target is a Qwen2 whose state before the final norm goes to the MTP module; the shipped drafter was trained with
the state after it. So the weight w of the target's final norm moves into `lm_head` (its columns are multiplied by w),
and in the module `final_layernorm` is divided by w and `hidden_layernorm` multiplied by w / rms(w). The target's tokens
are those of the shipped one; the drafter's input differs by one factor per row, near 1, so its acceptance is not quite
the shipped drafter's. Biases of query, key and value are zero; MLPs are filled up with zeros to the drafter's width.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from specgraph_run import shipped_pair
from torch import Tensor

KEPT = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "rms_norm_eps",
    "hidden_act", "max_position_embeddings", "bos_token_id", "eos_token_id",
)  # fmt: skip
NORMS = {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "shared_head.norm": "final_layernorm"}


def write_mimo(out: Path, drafter: Path) -> Path:
    """Write OUT/{config.json, model.safetensors, tokenizer.json}; returns OUT. `drafter` has DeepSeek-V3's names."""
    target = shipped_pair()[0]
    config = json.loads((target / "config.json").read_text())
    draft_config = json.loads((drafter / "config.json").read_text())
    width, layers = draft_config["intermediate_size"], config["num_hidden_layers"]
    own, drafts = load_file(target / "model.safetensors"), load_file(drafter / "model.safetensors")
    norm = own["model.norm.weight"].float()
    tensors = {name: widened(name, tensor, width) for name, tensor in own.items()}
    tensors["lm_head.weight"] = (own["model.embed_tokens.weight"].float() * norm).half()
    tensors["model.norm.weight"] = torch.ones_like(own["model.norm.weight"])
    old, new = f"model.layers.{layers}.", "model.mtp_layers.0."
    for name, tensor in drafts.items():
        part = name.removeprefix(old).removesuffix(".weight")
        if part == "eh_proj":
            embedding, hidden = tensor.chunk(2, dim=1)
            tensors[f"{new}input_proj.weight"] = torch.cat((hidden, embedding), dim=1)
        elif part == "hnorm":
            tensors[f"{new}hidden_layernorm.weight"] = (tensor.float() * norm / norm.square().mean().sqrt()).half()
        elif part == "shared_head.norm":
            tensors[f"{new}final_layernorm.weight"] = (tensor.float() / norm).half()
        else:
            tensors[f"{new}{NORMS.get(part, part)}.weight"] = tensor
    for name in [name for name in tensors if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]:
        tensors[name.replace("weight", "bias")] = tensors[name].new_zeros(tensors[name].shape[0])
    made = {name: config[name] for name in KEPT} | {
        "architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "intermediate_size": width, "rope_theta": 10000.0,
        "tie_word_embeddings": False, "num_nextn_predict_layers": 1, "use_sliding_window": False,
        "torch_dtype": "float16",
    }  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(made, indent=2) + "\n")
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, out / "model.safetensors")
    shutil.copy(target / "tokenizer.json", out)
    return out


def widened(name: str, tensor: Tensor, width: int) -> Tensor:
    """An MLP's matrix with zeros up to `width`; any other tensor as it is."""
    if name.endswith(("gate_proj.weight", "up_proj.weight")):
        return torch.nn.functional.pad(tensor, (0, 0, 0, width - tensor.shape[0]))
    if name.endswith("down_proj.weight"):
        return torch.nn.functional.pad(tensor, (0, width - tensor.shape[1]))
    return tensor


if __name__ == "__main__":
    write_mimo(Path(sys.argv[1]), Path(__file__).parents[3] / "examples/tiny-python/drafters/mtp")
