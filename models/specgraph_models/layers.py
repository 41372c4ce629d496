"""The parts of every model here: tensor operations, the weights of one decoder layer, and a pass through it.

Where `specgraph.ops` has a fused op, it is used, so a device's own kernels apply to every model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from specgraph import ops
from specgraph.attention import Attend, AttentionLayer
from specgraph.ops.linear import Norm, Weight
from specgraph.parallel import WHOLE, TensorParallel
from specgraph_models import ops as model_ops
from specgraph_models.config import Activation
from specgraph_models.experts import Experts, mixture
from specgraph_models.latent import LatentAttention, latent_heads, latent_values
from specgraph_models.split import row_parallel


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension; float16 and bfloat16 are normalised in float32."""
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows]: x [T, size], rows int64 [R] -> [R, size]."""
    out = x.new_empty(rows.shape[0], x.shape[1])
    ops.take_rows(x, rows, out)
    return out


@dataclass(frozen=True, slots=True)
class EngineMlp:
    """An engine's own module in place of a layer's MLP: a mixture of experts, by the engine's kernels."""

    forward: Callable[[Tensor], Tensor]
    """Normalised rows [T, hidden_size] -> [T, hidden_size], summed over the ranks; it must be capturable."""
    weights: Mapping[str, Tensor]
    """The tensors that it reads, by name."""


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights of one layer. Query, key and value projections are packed in one matrix, gate and up in another."""

    qkv: Weight
    """[(num_heads + 2 * num_kv_heads) * head_dim, input size]; or each head's query is followed by as many rows,
    whose sigmoid is a gate of the attention's output (Qwen3-Next). See `LatentAttention` for a layer with latents."""
    output: Weight
    """[hidden_size, num_heads * head_dim]; per head the size of its value in a layer with latents."""
    post_norm: Tensor
    """[hidden_size], between attention and MLP."""
    gate_up: Weight
    """[2 * intermediate_size, hidden_size]; with experts [num_experts, 2 * inner, hidden_size]; empty with `mlp`."""
    down: Weight
    """[hidden_size, intermediate_size]; with experts [num_experts, hidden_size, inner]; empty with `mlp`."""
    input_norm: Tensor | None = None
    """[hidden_size]; None where the layer takes its input as it is (EAGLE-1)."""
    query_norm: Tensor | None = None
    """[head_dim] (Qwen3)."""
    key_norm: Tensor | None = None
    """[head_dim] (Qwen3)."""
    experts: Experts | None = None
    """The router, where the MLP is a mixture of experts."""
    mlp: EngineMlp | None = None
    """The MLP of a layer that an engine has loaded, where its module computes it."""
    sinks: Tensor | None = None
    """[num_heads] (gpt-oss); see `AttentionLayer.sinks`."""
    attention_norm: Tensor | None = None
    """[hidden_size]: norm of the attention's output (Gemma 3)."""
    mlp_norm: Tensor | None = None
    """[hidden_size]: norm of the MLP's output (Gemma 3)."""
    activation: Activation = "silu"
    latent: LatentAttention | None = None
    """The rest of the attention, where it is multi-head latent attention."""
    tensor_parallel: TensorParallel = WHOLE
    """The ranks that split it. Where it is split, heads and inner columns here are this rank's."""

    def rank_parts(self) -> tuple[Weight | Tensor | EngineMlp | None, ...]:
        """Return the weights of which each rank has a part of its own: heads, inner columns, or experts.

        An engine's own MLP is among them as a whole if ranks split the layer: its weights are not told apart.
        """
        ranks, output = self.tensor_parallel, _without_bias(self.output)
        if self.experts is not None and ranks.experts is not None:
            mlp = (self.gate_up, self.down) if ranks.experts.size > 1 else ()
        else:
            mlp = (self.gate_up, _without_bias(self.down), self.mlp) if ranks.size > 1 else ()
        if ranks.size == 1 or (self.latent is not None and not self.latent.config.splits_heads):
            return mlp
        if self.latent is None:
            return self.qkv, self.sinks, output, *mlp
        query = self.qkv if self.latent.query_up is None else self.latent.query_up
        return query, self.latent.key_up, self.latent.value_up, output, *mlp


def _without_bias(split_by_columns: Weight) -> Weight:
    """Return the part that a rank has of its own: every rank has the bias whole, and the first one adds it."""
    return split_by_columns._replace(bias=None)


def decoder_blocks(
    x: Tensor,
    layers: Sequence[DecoderLayer],
    shapes: Sequence[AttentionLayer],
    attend: Attend,
    eps: float,
    rows: Tensor | None = None,
    first_qkv: Tensor | None = None,
    first_index: int = 0,
) -> list[Tensor]:
    """Return the residual stream x [T, hidden_size] through layers one after the other: what leaves each of them.

    Args:
        rows: int64 [R]: compute only these rows after the last layer's attention, when only some rows of its output are
            read; keys and values are written for all T rows.
        first_qkv: the packed projection of the first layer [T, rows of `DecoderLayer.qkv`], where the head computes it.
        first_index: the layer index, in `attend`, of the first layer.
    """
    leaving = list[Tensor]()
    qkv = first_qkv
    for place, (layer, shape) in enumerate(zip(layers, shapes, strict=True)):
        if qkv is None:
            norm = None if layer.input_norm is None else Norm(layer.input_norm, eps)
            qkv = ops.norm_linear(x, norm, layer.qkv)
        following = layers[place + 1] if place + 1 < len(layers) else None
        chosen = rows if following is None else None
        x, qkv = _attention_and_mlp(x, qkv, layer, shape, first_index + place, attend, eps, chosen, following)
        leaving.append(x)
    return leaving


def _attention_and_mlp(
    residual: Tensor,
    qkv: Tensor,
    layer: DecoderLayer,
    shape: AttentionLayer,
    index: int,
    attend: Attend,
    eps: float,
    rows: Tensor | None,
    following: DecoderLayer | None,
) -> tuple[Tensor, Tensor | None]:
    """Return a layer after its packed projection; and the projection of the layer that follows, where one op computes
    it."""
    if layer.latent is None:
        query, key, value, gate = split_heads(qkv, layer, shape, eps)
        attended = attend(index, query, key, value)
        if gate is not None:
            attended = attended * torch.sigmoid(gate)
        attended = attended.reshape(residual.shape[0], -1)
    else:
        query, key = latent_heads(qkv, layer.latent)
        attended = latent_values(attend(index, query, key, key), layer.latent)
    if rows is not None:
        attended, residual = take_rows(attended, rows), take_rows(residual, rows)
    if _is_fused(layer):
        norm = Norm(layer.post_norm, eps)
        residual, inner = model_ops.linear_norm_gate_up(attended, layer.output, residual, norm, layer.gate_up)
        if following is not None and following.input_norm is not None:
            norm = Norm(following.input_norm, eps)
            return model_ops.linear_norm_linear(inner, layer.down, residual, norm, following.qkv)
        return ops.norm_linear(inner, None, layer.down, residual), None
    return _general_mlp(attended, residual, layer, eps), None


def _is_fused(layer: DecoderLayer) -> bool:
    """Return whether nothing but a residual sum and a norm lies between attention, MLP and the next layer."""
    others = layer.attention_norm, layer.mlp_norm, layer.experts, layer.mlp
    return layer.activation == "silu" and layer.tensor_parallel.size == 1 and all(other is None for other in others)


def _general_mlp(attended: Tensor, residual: Tensor, layer: DecoderLayer, eps: float) -> Tensor:
    """Return a layer after its attention, with whatever lies between its linears."""
    ranks = layer.tensor_parallel
    heads = ranks if layer.latent is None or layer.latent.config.splits_heads else WHOLE
    if layer.attention_norm is None:
        residual = row_parallel(attended, layer.output, residual, heads)
    else:
        out = row_parallel(attended, layer.output, None, heads)
        residual = residual + rms_norm(out, layer.attention_norm, eps)
    if layer.mlp is not None:
        return residual + layer.mlp.forward(rms_norm(residual, layer.post_norm, eps))
    if layer.experts is not None:
        x = rms_norm(residual, layer.post_norm, eps)
        return residual + mixture(x, layer.experts, layer.gate_up, layer.down, ranks)
    norm = Norm(layer.post_norm, eps)
    if layer.activation == "silu":
        inner = model_ops.norm_gate_up(residual, norm, layer.gate_up)
    else:
        gate, up = ops.norm_linear(residual, norm, layer.gate_up).chunk(2, dim=-1)
        inner = functional.gelu(gate, approximate="tanh") * up
    if layer.mlp_norm is None:
        return row_parallel(inner, layer.down, residual, ranks)
    out = row_parallel(inner, layer.down, None, ranks)
    return residual + rms_norm(out, layer.mlp_norm, eps)


def split_heads(
    qkv: Tensor, layer: DecoderLayer, shape: AttentionLayer, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the packed projection as query, key and value, each [T, heads, head_dim], normalised if the layer has
    norms, and the gate of the attention's output, as the query, if it has one."""
    rows, kv_size, dim = qkv.shape[0], shape.num_kv_heads * shape.head_dim, shape.head_dim
    query, key, value = qkv.split((qkv.shape[1] - 2 * kv_size, kv_size, kv_size), dim=-1)
    query, *gates = query.view(rows, shape.num_heads, -1).split(dim, dim=-1)
    key = key.view(rows, shape.num_kv_heads, dim)
    if layer.query_norm is not None:
        query = rms_norm(query, layer.query_norm, eps)
    if layer.key_norm is not None:
        key = rms_norm(key, layer.key_norm, eps)
    return query, key, value.view(rows, shape.num_kv_heads, dim), gates[0] if gates else None
