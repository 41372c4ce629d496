"""Rewrites a folder's linears as FP8, as the tools of the field store them, without specgraph's own code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn
LINEAR = re.compile(r".*(proj|experts\.\d+\.w\d)\.weight")
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 12]}


def compressed(strategy: str, **weights: object) -> dict:
    """Return the keys that the package compressed-tensors writes for FP8 with activations quantised per token."""
    activations = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
    kind = {"num_bits": 8, "type": "float", "strategy": strategy, "dynamic": False, "symmetric": True, **weights}
    groups = {"group_0": {"targets": ["Linear"], "weights": kind, "input_activations": activations}}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups,
            "ignore": ["lm_head"], "kv_cache_scheme": None}  # fmt: skip


def stored(weight: Tensor, section: dict) -> tuple[Tensor, Tensor, Tensor]:
    """A weight in float8, its scale, and their product in float64."""
    rows, columns = weight.shape
    if "weight_block_size" in section:
        a, b = section["weight_block_size"]
        scale = torch.empty(-(-rows // a), -(-columns // b))
        full = torch.empty(rows, columns)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                part = slice(i * a, (i + 1) * a), slice(j * b, (j + 1) * b)
                scale[i, j] = full[part] = weight[part].abs().max() / 448
    elif section.get("config_groups", {}).get("group_0", {}).get("weights", {}).get("strategy") == "channel":
        scale = full = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    else:
        scale = full = weight.abs().max() / 448
    values = (weight / full.float()).to(FLOAT8)
    return values, scale, values.double() * full.double()


def quantise(folder: Path, section: dict, suffix: str) -> dict[str, Tensor]:
    """Rewrite a folder's linears; the float64 products by name."""
    path, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    tensors, products = load_file(path), {}
    for name in [name for name in tensors if LINEAR.fullmatch(name)]:
        values, scale, products[name] = stored(tensors[name], section)
        tensors |= {name: values, f"{name}_{suffix}": scale.contiguous()}
    save_file(tensors, path)
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    return products
