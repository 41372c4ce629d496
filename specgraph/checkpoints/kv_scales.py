"""Scales of an FP8 KV cache, put into the weights: attention then needs to know nothing of them.

A calibrated folder has `k_scale` and `v_scale` beside the attention of a layer: keys and values divided by them fill
the range of e4m3. Rounded up to powers of two, they change only exponents: the weights that make keys and values are
divided by them, and scores and the output projection multiplied, without any rounding.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specgraph.checkpoints.files import shown
from specgraph.checkpoints.folder import CheckpointFolder
from specgraph.errors import CheckpointError
from specgraph.models.config import ModelConfig
from specgraph.models.layers import DecoderLayer

_SMALLEST, _LARGEST = 2.0**-20, 2.0**20


def kv_scale(folder: CheckpointFolder, name: str) -> float:
    """The least power of two that is not below the scale `name`; 1 where the folder has none.

    Raises:
        CheckpointError: it is not one positive number of plausible size.
    """
    if name not in folder:
        return 1.0
    shape = folder.tensors[name].shape
    given = folder.weight(name, shape if shape in ((), (1,)) else (), torch.float32)
    value = float(given)
    if not _SMALLEST <= value <= _LARGEST:
        raise CheckpointError(
            f"{folder.folder}: {shown(name)} is {value:g}; a scale of the KV cache is in {_SMALLEST:g} to {_LARGEST:g}"
        )
    return 2.0 ** math.ceil(math.log2(value))


def scale_kv(folder: CheckpointFolder, prefix: str, layer: DecoderLayer, config: ModelConfig) -> DecoderLayer:
    """The layer whose keys and values are smaller by the scales of `prefix`; its results are the same.

    Args:
        prefix: of the attention's tensors.

    Raises:
        CheckpointError: a weight overflows its dtype, as some do in float16.
    """
    key, value = (kv_scale(folder, f"{prefix}.{kind}_scale") for kind in "kv")
    if key == value == 1.0:
        return layer
    size = config.local_kv_heads * config.head_dim
    rows = slice(-2 * size, -size), slice(-size, None)
    # A norm of each key head undoes what its projection is divided by: there the norm is divided.
    parts = [(rows[1], value)] if layer.key_norm is not None else [(rows[0], key), (rows[1], value)]

    def divided(packed: Tensor | None) -> Tensor | None:
        if packed is not None:
            packed = packed.clone()
            for part, factor in parts:
                packed[..., part] /= factor
        return packed

    changed: dict[str, Any] = {"qkv_bias": divided(layer.qkv_bias), "key_scale": key}
    if layer.qkv_scale is None:
        transposed = divided(layer.qkv.t())
        assert transposed is not None
        changed["qkv"] = transposed.t().contiguous()
    else:
        changed["qkv_scale"] = divided(layer.qkv_scale)
    if layer.output_scale is None:
        changed["output"] = layer.output * value
    else:
        changed["output_scale"] = layer.output_scale * value
    if layer.key_norm is not None:
        changed["key_norm"] = layer.key_norm / key
    for name, tensor in changed.items():
        if isinstance(tensor, Tensor) and not bool(tensor.isfinite().all()):
            raise CheckpointError(
                f"{folder.folder}: the scales of {shown(prefix)} for an FP8 KV cache, {key:g} and {value:g}, make "
                f"{name} overflow {str(tensor.dtype).removeprefix('torch.')}: load it in bfloat16, or with auto"
            )
    return replace(layer, **changed)
