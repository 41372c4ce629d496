"""The parts of every model here: tensor functions, the weights of one decoder layer, and its forward pass.

They use the fused ops of `specgraph.ops` and `specgraph_models.ops`, so a device's own kernels serve every model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor
from torch.nn import functional

from specgraph import ops
from specgraph.attention import Attend, AttentionLayer
from specgraph.errors import ConfigError
from specgraph.ops.linear import Norm, Weight, normed
from specgraph_models import ops as model_ops
from specgraph_models.config import Activation
from specgraph_models.delta import DeltaNet, Recur, delta_heads
from specgraph_models.experts import Experts, mixture
from specgraph_models.latent import LatentAttention, latent_heads, latent_values
from specgraph_models.parallel import WHOLE, TensorParallel
from specgraph_models.split import row_parallel


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) * weight over the last dimension. float16 and bfloat16 are normalised in float32."""
    return normed(x, weight, eps)


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Return x[rows], [R, size], of x [T, size] and rows int64 [R]."""
    out = x.new_empty(rows.shape[0], x.shape[1])
    ops.take_rows(x, rows, out)
    return out


@dataclass(frozen=True, slots=True)
class EngineMlp:
    """A host engine's own module in place of a layer's MLP: a mixture of experts, run by the host engine's kernels."""

    forward: Callable[[Tensor], Tensor]
    """Normalised rows [T, hidden_size] -> [T, hidden_size], summed over the ranks. It must be capturable."""
    weights: Mapping[str, Tensor]
    """The tensors that it reads, by name."""


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """The weights of one layer. Query, key and value projections are packed in one matrix, gate and up in another."""

    qkv: Weight
    """[(num_heads + 2 * num_kv_heads) * head_dim, input size]. In Qwen3-Next each head's query is followed by
    head_dim gate rows, whose sigmoid scales the attention's output. For a layer with latents see `LatentAttention`, for
    a recurrent one `DeltaNet`."""
    output: Weight
    """[hidden_size, num_heads * head_dim]. In a layer with latents, the size of a value takes the place of head_dim."""
    post_norm: Tensor
    """[hidden_size], between attention and MLP."""
    gate_up: Weight
    """[2 * intermediate_size, hidden_size], or [num_experts, 2 * inner, hidden_size] with experts. Empty with `mlp`."""
    down: Weight
    """[hidden_size, intermediate_size], or [num_experts, hidden_size, inner] with experts. Empty with `mlp`."""
    input_norm: Tensor | None = None
    """[hidden_size]. None if the layer takes its input as it is (EAGLE-1)."""
    query_norm: Tensor | None = None
    """[head_dim] (Qwen3), or [num_heads * head_dim] for a norm of all heads at once (MiniMax-M2)."""
    key_norm: Tensor | None = None
    """[head_dim], or [num_kv_heads * head_dim]."""
    experts: Experts | None = None
    """The router. None unless the MLP is a mixture of experts."""
    mlp: EngineMlp | None = None
    """The host engine's module that computes the MLP. None if the layer computes it."""
    sinks: Tensor | None = None
    """[num_heads] (gpt-oss); see `AttentionLayer.sinks`."""
    attention_norm: Tensor | None = None
    """[hidden_size]: norm of the attention's output (Gemma 3)."""
    mlp_norm: Tensor | None = None
    """[hidden_size]: norm of the MLP's output (Gemma 3)."""
    activation: Activation = "silu"
    latent: LatentAttention | None = None
    """The rest of the attention if it is multi-head latent attention. Otherwise None."""
    delta: DeltaNet | None = None
    """The rest of the layer if it has a gated delta net in place of attention. Otherwise None."""
    tensor_parallel: TensorParallel = WHOLE
    """The ranks that split the layer. If they do, the heads and inner columns here are this rank's."""

    def rank_parts(self) -> tuple[Weight | Tensor | EngineMlp | None, ...]:
        """Return the weights that are split over ranks: by heads, inner columns, or experts.

        If ranks split the layer, a host engine's own MLP counts as split as a whole: its weights are not told apart.
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
    """Return the part of a weight that is split over ranks. Every rank has the whole bias; the first one adds it."""
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
    recur: Recur | None = None,
) -> list[Tensor]:
    """Run the residual stream x [T, hidden_size] through layers one after the other. Return the output of each.

    Args:
        rows: int64 [R]: after the last layer's attention, compute only these rows. Keys and values are written for all
            T rows. None computes all rows.
        first_qkv: the packed projection of the first layer, [T, rows of `DecoderLayer.qkv`]. None if it is to be
            computed here.
        shapes: the attention of the layers that have it, in order.
        first_index: the index in `attend` of the first layer with attention.
        recur: for the other layers. None if all layers have attention.
    """
    leaving = list[Tensor]()
    qkv = first_qkv
    attended = iter(enumerate(shapes, first_index))
    recurrent = count()
    for place, layer in enumerate(layers):
        if qkv is None:
            norm = None if layer.input_norm is None else Norm(layer.input_norm, eps)
            qkv = ops.norm_linear(x, norm, layer.qkv)
        following = layers[place + 1] if place + 1 < len(layers) else None
        chosen = rows if following is None else None
        if layer.delta is None:
            heads = _attended(qkv, layer, *next(attended), attend, eps)
        elif recur is not None:
            heads = delta_heads(qkv, layer.delta, next(recurrent), recur, eps)
        else:
            raise ConfigError("a model with recurrent layers needs `recur`, the states of its requests")
        x, qkv = _output_and_mlp(heads, x, layer, eps, chosen, following)
        leaving.append(x)
    return leaving


def _attended(
    qkv: Tensor, layer: DecoderLayer, index: int, shape: AttentionLayer, attend: Attend, eps: float
) -> Tensor:
    """Return the attention's output for all heads, [T, num_heads * size of a value]."""
    if layer.latent is not None:
        query, key = latent_heads(qkv, layer.latent)
        return latent_values(attend(index, query, key, key), layer.latent)
    query, key, value, gate = split_heads(qkv, layer, shape, eps)
    attended = attend(index, query, key, value)
    if gate is not None:
        attended = attended * torch.sigmoid(gate)
    return attended.reshape(qkv.shape[0], -1)


def _output_and_mlp(
    attended: Tensor,
    residual: Tensor,
    layer: DecoderLayer,
    eps: float,
    rows: Tensor | None,
    following: DecoderLayer | None,
) -> tuple[Tensor, Tensor | None]:
    """Run a layer from its heads' output on. Return its output, and the next layer's projection or None.

    The next layer's projection is returned if one op computes it together with this layer's last linear.
    """
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
    """Return whether only a residual sum and a norm lie between attention, MLP and the next layer."""
    others = layer.attention_norm, layer.mlp_norm, layer.experts, layer.mlp
    return layer.activation == "silu" and layer.tensor_parallel.size == 1 and all(other is None for other in others)


def _general_mlp(attended: Tensor, residual: Tensor, layer: DecoderLayer, eps: float) -> Tensor:
    """Run a layer from its attention's output on, with all norms, experts and exchanges that it may have."""
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
    """Split the packed projection into query, key and value, [T, heads, head_dim] each, and the gate or None.

    Query and key are normalised if the layer has norms for them. The gate has the shape of the query.
    """
    rows, kv_size, dim = qkv.shape[0], shape.num_kv_heads * shape.head_dim, shape.head_dim
    query, key, value = qkv.split((qkv.shape[1] - 2 * kv_size, kv_size, kv_size), dim=-1)
    query, *gates = query.view(rows, shape.num_heads, -1).split(dim, dim=-1)
    key = key.view(rows, shape.num_kv_heads, dim)
    if layer.query_norm is not None:
        query = _normed_heads(query, layer.query_norm, eps)
    if layer.key_norm is not None:
        key = _normed_heads(key, layer.key_norm, eps)
    return query, key, value.view(rows, shape.num_kv_heads, dim), gates[0] if gates else None


def _normed_heads(heads: Tensor, norm: Tensor, eps: float) -> Tensor:
    """Return rms_norm of heads [T, heads, head_dim]: of each head, or of all at once if the norm has a factor for each
    element of all heads."""
    of_each = norm.shape[0] == heads.shape[-1]
    return rms_norm(heads, norm, eps) if of_each else rms_norm(heads.flatten(1), norm, eps).view(heads.shape)
