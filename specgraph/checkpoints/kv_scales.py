"""Scales of an FP8 KV cache, put into the weights: attention then needs to know nothing of them.

A calibrated folder has `k_scale` and `v_scale` beside the attention of a layer: keys and values divided by them fill
the range of e4m3. Rounded up to powers of two, they change only exponents: the weights that make keys and values are
divided by them, and scores and the output projection multiplied, without any rounding.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from specgraph.checkpoints.files import shown
from specgraph.checkpoints.folder import CheckpointFolder
from specgraph.errors import CheckpointError
from specgraph.models.config import ModelConfig
from specgraph.models.layers import DecoderLayer

_SMALLEST, _LARGEST = 2.0**-20, 2.0**20


def kv_scale(folder: CheckpointFolder, name: str) -> float:
    """Return the least power of two that is not below the scale `name`; 1 where the folder has none."""
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
    """Return the layer with keys and values smaller by the scales of the attention `prefix`; its results are the same.

    A weight that overflows its dtype is refused; some do in float16.
    """
    key, value = (kv_scale(folder, f"{prefix}.{kind}_scale") for kind in "kv")
    if key == value == 1.0:
        return layer
    size = config.local_kv_heads * config.head_dim
    rows = slice(-2 * size, -size), slice(-size, None)
    # A norm of each key head undoes what its projection is divided by: there the norm is divided.
    parts = [(rows[1], value)] if layer.key_norm is not None else [(rows[0], key), (rows[1], value)]

    def divided(packed: Tensor) -> Tensor:
        packed = packed.clone()
        for part, factor in parts:
            packed[..., part] /= factor
        return packed

    qkv, output = layer.qkv, layer.output
    if qkv.bias is not None:
        qkv = qkv._replace(bias=divided(qkv.bias))
    if qkv.scale is None:
        qkv = qkv._replace(matrix=divided(qkv.matrix.t()).t().contiguous())
    else:
        qkv = qkv._replace(scale=divided(qkv.scale))
    if output.scale is None:
        output = output._replace(matrix=output.matrix * value)
    else:
        output = output._replace(scale=output.scale * value)
    changed = qkv.named_tensors("qkv") | output.named_tensors("output")
    key_norm = None if layer.key_norm is None else layer.key_norm / key
    if key_norm is not None:
        changed["key_norm"] = key_norm
    for name, tensor in changed.items():
        if tensor.dtype != torch.float8_e4m3fn and not bool(tensor.isfinite().all()):
            raise CheckpointError(
                f"{folder.folder}: the scales of {shown(prefix)} for an FP8 KV cache, {key:g} and {value:g}, make "
                f"{name} overflow {str(tensor.dtype).removeprefix('torch.')}: load it in bfloat16, or with auto"
            )
    return replace(layer, qkv=qkv, output=output, key_norm=key_norm, key_scale=key)
