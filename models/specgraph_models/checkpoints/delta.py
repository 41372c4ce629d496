"""Reads gated delta nets (Qwen3-Next, Qwen3.5): their sizes from config.json, and the tensors of one layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specgraph_models.checkpoints.config_source import ConfigSource
from specgraph_models.checkpoints.files import shown
from specgraph_models.checkpoints.folder import CheckpointFolder
from specgraph_models.delta import DeltaConfig, DeltaNet
from specgraph_models.layers import Weight
from specgraph_models.ops.delta import DeltaWeights


def delta_config(source: ConfigSource, num_layers: int) -> tuple[DeltaConfig, tuple[bool, ...]]:
    """Return the sizes of the recurrent layers, and for each layer True if it is one."""
    source.require({"mamba_ssm_dtype": "float32", "attn_output_gate": True})
    gate = source.string("output_gate_type", "swish")
    if gate not in ("swish", "silu"):
        raise source.fail("output_gate_type", f"is {shown(gate)}; only 'swish', which is silu, is supported")
    keys, values = source.integer("linear_num_key_heads", 16), source.integer("linear_num_value_heads", 32)
    if values % keys:
        raise source.fail("linear_num_value_heads", f"is {values}, not a multiple of the {keys} key heads")
    types, every = source.strings("layer_types"), source.integer("full_attention_interval", 4)
    types = types or tuple("linear_attention" if (i + 1) % every else "full_attention" for i in range(num_layers))
    if len(types) != num_layers or not {*types} <= {"linear_attention", "full_attention"}:
        raise source.fail(
            "layer_types", f"is {shown(list(types))}; it should be linear_attention or full_attention for each of "
            f"{num_layers} layers"
        )  # fmt: skip
    if "full_attention" not in types:
        raise source.fail("layer_types", "has no full_attention; models without a KV cache are not supported")
    sizes = DeltaConfig(
        key_heads=keys,
        value_heads=values,
        key_size=source.integer("linear_key_head_dim", 128),
        value_size=source.integer("linear_value_head_dim", 128),
        kernel=source.integer("linear_conv_kernel_dim", 4),
    )
    return sizes, tuple(kind == "linear_attention" for kind in types)


def load_delta(folder: CheckpointFolder, prefix: str, config: DeltaConfig, hidden: int) -> dict[str, Any]:
    """Read the recurrent layer `prefix`: the fields `qkv`, `output` and `delta` of `DecoderLayer`.

    Qwen3-Next stores one projection with rows grouped by key head, Qwen3.5 one for each kind of rows. `A_log`,
    `dt_bias` and the norm are read as float32 whatever the dtype: authors store them so, and the decay is an exponent.
    """
    name, heads, values = f"{prefix}.linear_attn", config.value_heads, config.values
    if f"{name}.in_proj_qkvz.weight" in folder:
        qkv = Weight(_ungrouped(folder, name, config, hidden))
    else:
        rows = {"qkv": config.channels, "z": values, "b": heads, "a": heads}
        qkv = folder.matrix(
            [f"{name}.in_proj_{part}.weight" for part in rows], [(count, hidden) for count in rows.values()]
        )
    decay = -folder.weight(f"{name}.A_log", (heads,), torch.float32).exp()
    weights = DeltaWeights(
        conv=folder.weight(f"{name}.conv1d.weight", (config.channels, 1, config.kernel)).squeeze(1).contiguous(),
        decay=decay,
        dt_bias=folder.weight(f"{name}.dt_bias", (heads,), torch.float32),
    )
    norm = folder.weight(f"{name}.norm.weight", (config.value_size,), torch.float32)
    output = folder.matrix([f"{name}.out_proj.weight"], [(hidden, values)])
    return {"qkv": qkv, "output": output, "delta": DeltaNet(config, weights, norm)}


def _ungrouped(folder: CheckpointFolder, name: str, config: DeltaConfig, hidden: int) -> Tensor:
    """Return the rows of Qwen3-Next's two projections in the order of `DeltaNet`.

    Their rows are grouped by key head: query, key, values, gates of the head; and logits of beta, inputs of the decay.
    """
    each = config.value_heads // config.key_heads
    sizes = config.key_size, config.key_size, each * config.value_size, each * config.value_size
    grouped = folder.weight(f"{name}.in_proj_qkvz.weight", (2 * config.keys + 2 * config.values, hidden))
    gates = folder.weight(f"{name}.in_proj_ba.weight", (2 * config.value_heads, hidden))
    parts = grouped.view(config.key_heads, -1, hidden).split(sizes, dim=1)
    parts += gates.view(config.key_heads, -1, hidden).split((each, each), dim=1)
    return torch.cat([part.flatten(0, 1) for part in parts])
