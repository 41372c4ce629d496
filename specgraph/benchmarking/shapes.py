"""Draft heads by name, with random weights: speed depends on shapes, not on what the weights say."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specgraph.errors import ConfigError
from specgraph.models.config import ModelConfig, RotaryConfig
from specgraph.models.decoder_layer import DecoderLayer
from specgraph.models.eagle3 import Eagle3Config, Eagle3Head, Eagle3Weights


@dataclass(frozen=True, slots=True)
class BenchShape:
    """An EAGLE-3 head of one decoder layer."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    num_aux: int = 3
    rope_theta: float = 500000.0


SHAPES: dict[str, BenchShape] = {
    "eagle3-tiny-python": BenchShape(192, 512, 6, 2, 32, 2048, 1024, rope_theta=10000.0),
    "eagle3-llama3-8b": BenchShape(4096, 14336, 32, 8, 128, 128256, 32000),
    "eagle3-qwen3-8b": BenchShape(4096, 12288, 32, 8, 128, 151936, 32000, rope_theta=1000000.0),
}
"""Shapes that `specgraph bench --shape` knows."""


def shape_named(name: str) -> BenchShape:
    """Raises ConfigError for an unknown name, listing the known ones."""
    if name not in SHAPES:
        raise ConfigError(f"unknown shape '{name}'; there are {', '.join(SHAPES)}")
    return SHAPES[name]


def random_head(shape: BenchShape, device: torch.device, dtype: torch.dtype, max_model_len: int) -> Eagle3Head:
    """A head of that shape; weights are normal with variance 1 / columns, so activations neither vanish nor grow."""
    g = torch.Generator(device=device).manual_seed(0)

    def weight(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns, generator=g, device=device) * columns**-0.5).to(dtype)

    def norm(size: int) -> Tensor:
        return torch.ones(size, device=device, dtype=dtype)

    hidden, inner = shape.hidden_size, shape.intermediate_size
    query, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    layer = DecoderLayer(
        qkv=weight(query + 2 * kv, 2 * hidden),
        output=weight(hidden, query),
        post_norm=norm(hidden),
        gate_up=weight(2 * inner, hidden),
        down=weight(hidden, inner),
        input_norm=norm(hidden),
    )
    chosen = torch.randperm(shape.vocab_size, generator=g, device=device)[: shape.draft_vocab_size].sort().values
    weights = Eagle3Weights(
        embed_tokens=weight(shape.vocab_size, hidden),
        hidden_norm=norm(hidden),
        norm=norm(hidden),
        lm_head=weight(shape.draft_vocab_size, hidden),
        fc=weight(hidden, shape.num_aux * hidden),
        draft_to_target=chosen - torch.arange(shape.draft_vocab_size, device=device),
    )
    model = ModelConfig(
        architecture="llama",
        vocab_size=shape.vocab_size,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=1,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=1e-5,
        max_position_embeddings=max_model_len,
        tie_word_embeddings=False,
        dtype=dtype,
        rotary=RotaryConfig(theta=shape.rope_theta),
    )
    config = Eagle3Config(model, hidden, shape.draft_vocab_size, tuple(range(shape.num_aux)))
    return Eagle3Head(config, weights, [layer], max_model_len)


def bytes_per_propose(head: Eagle3Head, requests: int, k: int, context: int) -> int:
    """The least that K draft steps must read: the layer and lm_head once a step, fc once, the KV of every request.

    Embedding rows, norms and activations are left out: they are under a thousandth of it.
    """
    layer_bytes = sum(
        matrix.nbytes for layer in head.layers for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down)
    )
    once = head.tensors.fc.nbytes if head.tensors.fc is not None else 0
    element = head.dtype.itemsize
    kv_row = sum(2 * a.num_kv_heads * a.head_dim * element for a in head.attention_layers)
    kv = sum(requests * (context + step) * kv_row for step in range(k))
    return once + k * (layer_bytes + head.tensors.lm_head.nbytes) + kv
