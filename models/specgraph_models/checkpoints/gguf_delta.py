"""Gated delta nets in GGUF files (qwen35, qwen35moe, qwen3next): the names and layouts that differ from a folder's.

llama.cpp's converter stores norms as 1 + weight (but not the one of the gated delta net), -exp(A_log) for A_log, and
the convolution as a matrix. In qwen35 files value heads are tiled: head v * key_heads + k is a folder's head k * r + v,
with r value heads per key head. In qwen3next files they are in a folder's order, and `ssm_ba` is grouped by key head.
Source: llama.cpp's converter; transformers 5.24 undoes the same changes of qwen35 and qwen35moe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

ARCHITECTURES = {"qwen35": "qwen3_5_text", "qwen35moe": "qwen3_5_moe_text", "qwen3next": "qwen3_next"}
"""`general.architecture` -> `model_type` of config.json."""

KEYS = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "full_attention_interval": "full_attention_interval",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
"""Keys behind `ARCHITECTURE.` -> keys of config.json."""

ELSEWHERE = frozenset(
    {"ssm.inner_size", "rope.dimension_sections", "attention.recurrent_layers", "nextn_predict_layers"}
)
"""Keys that `config_of` reads, or that repeat facts of other keys."""

_TENSORS = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
}
_OFFSET = ("attn_norm", "post_attention_norm", "attn_q_norm", "attn_k_norm", "output_norm")
"""Norms that are stored as 1 + weight."""

Change = Callable[[Tensor], Tensor]


def config_of(architecture: str, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return keys of config.json that follow from several of the file's keys. own: the keys behind `ARCHITECTURE.`."""
    config: dict[str, Any] = {}
    heads, inner, width = (own.get(key) for key in ("ssm.time_step_rank", "ssm.inner_size", "attention.key_length"))
    if type(heads) is int and type(inner) is int and heads > 0:
        config["linear_value_head_dim"] = inner // heads
    rotated = own.get("rope.dimension_count")
    if type(rotated) is int and type(width) is int and width > 0:
        config["partial_rotary_factor"] = rotated / width
    modules = own.get("nextn_predict_layers", 0)
    if type(modules) is int and type(own["block_count"]) is int:
        config["num_hidden_layers"] = own["block_count"] - modules  # the file counts MTP modules as blocks
    if isinstance(flags := own.get("attention.recurrent_layers"), list):
        kinds = ["linear_attention" if flag else "full_attention" for flag in flags]
        config["layer_types"] = kinds[: config.get("num_hidden_layers", len(kinds))]
    if architecture == "qwen3next":
        config["norm_topk_prob"] = True  # the value of every published model; the file has no key for it
    return config


def is_of_module(block: str | None, values: Mapping[str, Any]) -> bool:
    """Return whether a block of this number is an MTP module. Modules are counted as the last blocks."""
    prefix = values["general.architecture"]
    count, modules = (values.get(f"{prefix}.{key}", 0) for key in ("block_count", "nextn_predict_layers"))
    if block is None or prefix not in ARCHITECTURES or type(count) is not int or type(modules) is not int:
        return False
    return modules > 0 and int(block) >= count - modules


def changes(
    part: str, suffix: str, shape: tuple[int, ...], values: Mapping[str, Any]
) -> Iterator[tuple[str, tuple[int, ...], Change | None]]:
    """Yield a tensor's names in a folder, without the layer's prefix, with its shape and the change of its values.

    Nothing is yielded for a tensor that is named and stored as in other architectures.
    """
    architecture = values["general.architecture"]
    keys, heads = (values.get(f"{architecture}.ssm.{key}") for key in ("group_count", "time_step_rank"))
    if architecture not in ARCHITECTURES or type(keys) is not int or type(heads) is not int or not 0 < keys <= heads:
        return
    each, tiled = heads // keys, architecture != "qwen3next" and heads % keys == 0
    if part == "ssm_ba" and shape[0] == 2 * heads:
        for name, place in (("in_proj_b", 0), ("in_proj_a", 1)):
            yield f"linear_attn.{name}.weight", (heads, *shape[1:]), partial(_of_pairs, keys=keys, place=place)
        return
    name = _TENSORS.get(part)
    if part in _OFFSET:
        yield f"{name or _named(part)}.{suffix}", shape, _minus_one
    elif name is not None:
        ends = "" if part in ("ssm_a", "ssm_dt") else f".{suffix}"
        before = 0
        if part in ("attn_qkv", "ssm_conv1d"):
            before = shape[0] - values.get(f"{architecture}.ssm.inner_size", shape[0])
        reorders = tiled and each > 1 and part.startswith(("ssm_", "attn_")) and part != "ssm_norm"
        final = (*shape[:1], 1, *shape[1:]) if part == "ssm_conv1d" else (1, *shape) if len(shape) == 1 and part == (
            "ffn_gate_inp_shexp"
        ) else shape  # fmt: skip
        change = partial(
            _changed, shape=final, keys=keys if reorders else 1, each=each if reorders else 1, before=before,
            dim=1 if part == "ssm_out" else 0, is_decay=part == "ssm_a",
        )  # fmt: skip
        yield f"{name}{ends}", final, change


def _named(part: str) -> str:
    return {"attn_norm": "input_layernorm", "output_norm": "model.norm"}.get(part, f"self_attn.{part[5:]}")


def _minus_one(stored: Tensor) -> Tensor:
    return stored - 1


def _of_pairs(stored: Tensor, keys: int, place: int) -> Tensor:
    """Return the rows of one of two kinds, which are grouped by key head."""
    return stored.view(keys, 2, -1, stored.shape[-1])[:, place].flatten(0, 1)


def _changed(
    stored: Tensor, shape: tuple[int, ...], keys: int, each: int, before: int, dim: int, is_decay: bool
) -> Tensor:
    """Return values in a folder's order and shape.

    Args:
        keys, each: the key heads, and the value heads of each. The first `before` entries of `dim` are no values.
        is_decay: the values are -exp(A_log).
    """
    first, values = stored.split((before, stored.shape[dim] - before), dim=dim)
    values = values.unflatten(dim, (each, keys, -1)).transpose(dim, dim + 1).flatten(dim, dim + 2)
    whole = torch.cat((first, values), dim=dim)
    return (torch.log(-whole) if is_decay else whole).reshape(shape)
