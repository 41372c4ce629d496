"""One pre-norm decoder layer, shared by targets and drafters: its weights, and a pass through it."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from specgraph import kernels
from specgraph.attention import Attend, AttentionLayer
from specgraph.models.checkpoint_folder import CheckpointFolder
from specgraph.models.config import ModelConfig
from specgraph.models.layers import norm_gate_up, norm_linear, rms_norm
from specgraph.models.rotary import rotary_table


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights of one layer. Query, key and value projections are packed in one matrix, gate and up in another."""

    qkv: Tensor
    """[(num_heads + 2 * num_kv_heads) * head_dim, input size]"""
    output: Tensor
    """[hidden_size, num_heads * head_dim]"""
    post_norm: Tensor
    """[hidden_size], between attention and MLP."""
    gate_up: Tensor
    """[2 * intermediate_size, hidden_size]"""
    down: Tensor
    """[hidden_size, intermediate_size]"""
    input_norm: Tensor | None = None
    """[hidden_size]; None where the layer takes its input as it is (EAGLE-1)."""
    qkv_bias: Tensor | None = None
    output_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    query_norm: Tensor | None = None
    """[head_dim] (Qwen3)."""
    key_norm: Tensor | None = None
    """[head_dim] (Qwen3)."""

    def named_tensors(self, prefix: str) -> dict[str, Tensor]:
        """The tensors by dotted name, for the read-set."""
        return {f"{prefix}.{f.name}": v for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)}


def load_decoder_layer(
    folder: CheckpointFolder, prefix: str, config: ModelConfig, input_size: int | None = None, input_norm: bool = True
) -> DecoderLayer:
    """Read one layer whose tensors are named `prefix.self_attn.q_proj.weight` and so on.

    Args:
        folder: the checkpoint.
        prefix: for example "model.layers.0".
        config: sizes, and which optional tensors exist.
        input_size: columns of the query, key and value projections; `hidden_size` when None (EAGLE-3: twice that).
        input_norm: whether `prefix.input_layernorm` exists.

    Raises:
        CheckpointError: a missing tensor or one of another shape.
    """
    hidden, inner, width = config.hidden_size, config.intermediate_size, input_size or config.hidden_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv = [f"{prefix}.self_attn.{name}_proj" for name in ("q", "k", "v")]
    gate_up = [f"{prefix}.mlp.{name}_proj" for name in ("gate", "up")]

    def weight(name: str, *shape: int) -> Tensor:
        return folder.weight(f"{prefix}.{name}", shape)

    return DecoderLayer(
        qkv=folder.stacked([f"{n}.weight" for n in qkv], [(query, width), (kv, width), (kv, width)]),
        output=weight("self_attn.o_proj.weight", hidden, query),
        post_norm=weight("post_attention_layernorm.weight", hidden),
        gate_up=folder.stacked([f"{n}.weight" for n in gate_up], [(inner, hidden)] * 2),
        down=weight("mlp.down_proj.weight", hidden, inner),
        input_norm=weight("input_layernorm.weight", hidden) if input_norm else None,
        qkv_bias=folder.stacked([f"{n}.bias" for n in qkv], [(query,), (kv,), (kv,)]) if config.qkv_bias else None,
        output_bias=weight("self_attn.o_proj.bias", hidden) if config.output_bias else None,
        gate_up_bias=folder.stacked([f"{n}.bias" for n in gate_up], [(inner,)] * 2) if config.mlp_bias else None,
        down_bias=weight("mlp.down_proj.bias", hidden) if config.mlp_bias else None,
        query_norm=weight("self_attn.q_norm.weight", config.head_dim) if config.qk_norm else None,
        key_norm=weight("self_attn.k_norm.weight", config.head_dim) if config.qk_norm else None,
    )


def attention_layers(
    config: ModelConfig, num_layers: int, device: torch.device, causal: bool = True
) -> tuple[AttentionLayer, ...]:
    """The attention shapes of a model's layers; all share one rotary table."""
    table = rotary_table(config.rotary, config.max_position_embeddings, config.head_dim, device)
    layer = AttentionLayer(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5,
        rotary=table,
        causal=causal,
    )
    return (layer,) * num_layers


def decoder_block(
    x: Tensor,
    layer: DecoderLayer,
    shape: AttentionLayer,
    index: int,
    attend: Attend,
    eps: float,
    rows: Tensor | None = None,
) -> Tensor:
    """The residual stream x [T, hidden_size] through one layer; `rows` as in `attention_and_mlp`."""
    qkv = norm_linear(x, layer.input_norm, eps, layer.qkv, layer.qkv_bias)
    return attention_and_mlp(x, qkv, layer, shape, index, attend, eps, rows)


def attention_and_mlp(
    residual: Tensor,
    qkv: Tensor,
    layer: DecoderLayer,
    shape: AttentionLayer,
    index: int,
    attend: Attend,
    eps: float,
    rows: Tensor | None = None,
) -> Tensor:
    """The rest of a layer whose packed projection [T, (num_heads + 2 * num_kv_heads) * head_dim] is there already.

    `rows` (int64 [R]): go on with only these rows after attention. Right in a last layer, whose other rows nobody
    reads.
    """
    query, key, value = split_heads(qkv, layer, shape, eps)
    attended = attend(index, query, key, value).reshape(residual.shape[0], -1)
    if rows is not None:
        attended, residual = taken(attended, rows), taken(residual, rows)
    residual = norm_linear(attended, None, eps, layer.output, layer.output_bias, residual)
    inner = norm_gate_up(residual, layer.post_norm, eps, layer.gate_up, layer.gate_up_bias)
    return norm_linear(inner, None, eps, layer.down, layer.down_bias, residual)


def taken(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows], x [T, size], rows int64 [R]."""
    out = x.new_empty(rows.shape[0], x.shape[1])
    kernels.take_rows(x, rows, out)
    return out


def split_heads(qkv: Tensor, layer: DecoderLayer, shape: AttentionLayer, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The packed projection as query, key and value, each [T, heads, head_dim], heads normalised if the layer does."""
    rows, kv_size = qkv.shape[0], shape.num_kv_heads * shape.head_dim
    query, key, value = qkv.split((shape.num_heads * shape.head_dim, kv_size, kv_size), dim=-1)
    query = query.view(rows, shape.num_heads, shape.head_dim)
    key = key.view(rows, shape.num_kv_heads, shape.head_dim)
    if layer.query_norm is not None:
        query = rms_norm(query, layer.query_norm, eps)
    if layer.key_norm is not None:
        key = rms_norm(key, layer.key_norm, eps)
    return query, key, value.view(rows, shape.num_kv_heads, shape.head_dim)
