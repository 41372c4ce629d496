"""The parts that targets and draft heads share: decoder layers between an embedding and an output projection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from specgraph import ops
from specgraph.attention import Attend, AttentionLayer
from specgraph.models.config import ModelConfig
from specgraph.models.layers import DecoderLayer, decoder_blocks
from specgraph.models.protocol import OutputProjection
from specgraph.models.rotary import rotary_table
from specgraph.models.split import table_rows, whole_logits
from specgraph.ops.linear import PairInput, Weight


class DecoderModel:
    """Decoder layers, an embedding and an output projection. Subclasses say what happens around the layers."""

    def __init__(
        self,
        sizes: ModelConfig,
        embed_tokens: Tensor,
        layers: Sequence[DecoderLayer],
        lm_head: Tensor,
        *,
        output_norm: Tensor | None = None,
        causal: bool = True,
    ) -> None:
        """
        Args:
            sizes: of the layers.
            embed_tokens: [vocab_size, hidden_size], or this rank's rows; lm_head: the same of the output vocabulary,
                the same tensor when they are tied.
            output_norm: [hidden_size]: a norm that is part of `logits`, where it is fused with the projection.
            causal: whether rows see the rows before them only.
        """
        self.sizes, self.embed_tokens, self.layers, self.lm_head = sizes, embed_tokens, tuple(layers), lm_head
        self.output_norm, self._causal = output_norm, causal
        self.hidden_size, self.dtype = sizes.hidden_size, embed_tokens.dtype
        self.tensor_parallel = sizes.tensor_parallel
        self.attention_layers = self._attention_layers()

    def _attention_layers(self) -> tuple[AttentionLayer, ...]:
        """Return the attention shape of each layer; layers of one rotation share its table."""
        sizes, device = self.sizes, self.embed_tokens.device
        positions, dim = sizes.max_position_embeddings, sizes.rotary_dim or sizes.head_dim
        table = rotary_table(sizes.rotary, positions, dim, device)
        local = table
        if sizes.sliding_rotary is not None:
            local = rotary_table(sizes.sliding_rotary, positions, dim, device)
        return tuple(
            AttentionLayer(
                num_heads=sizes.local_heads,
                num_kv_heads=sizes.local_kv_heads,
                head_dim=sizes.head_dim,
                scale=(sizes.attention_scale or sizes.head_dim**-0.5) * layer.key_scale,
                rotary=local if any(sizes.sliding[index : index + 1]) else table,
                causal=self._causal,
                window=sizes.window(index),
                latent=sizes.latent is not None,
                sinks=layer.sinks,
            )
            for index, layer in enumerate(self.layers)
        )

    @property
    def output_vocab_size(self) -> int:
        """Columns of `logits`."""
        return self.sizes.vocab_size

    def shorten(self, max_model_len: int) -> None:
        """Run with fewer positions: the rotary table has a row for each, and a window that hides none is gone."""
        self.sizes = replace(self.sizes, max_position_embeddings=max_model_len)
        self.attention_layers = self._attention_layers()

    def run_layers(
        self, x: Tensor, attend: Attend, rows: Tensor | None = None, first_qkv: Tensor | None = None
    ) -> list[Tensor]:
        """Return what leaves each layer; see `decoder_blocks`."""
        eps = self.sizes.rms_norm_eps
        return decoder_blocks(x, self.layers, self.attention_layers, attend, eps, rows, first_qkv)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden_size] -> [N, output_vocab_size]."""
        return whole_logits(self._output.logits(hidden), self.tensor_parallel, self.output_vocab_size)

    @property
    def projection(self) -> OutputProjection | None:
        """See `Head.projection`."""
        return self._output

    @property
    def _output(self) -> OutputProjection:
        eps = self.sizes.rms_norm_eps
        return OutputProjection(self.output_norm, eps, self.lm_head, self.output_vocab_size, self.tensor_parallel)

    def weights(self) -> Mapping[str, Tensor]:
        """Return every tensor that the model reads, rotary tables too; subclasses put their own before them."""
        named = {"embed_tokens": self.embed_tokens, "lm_head": self.lm_head}
        named |= named_tensors(self.layers, "layers")
        for index, shape in enumerate(self.attention_layers):
            if shape.rotary is not None and all(shape.rotary is not table for table in named.values()):
                named["rotary" if index == 0 else f"rotary.{index}"] = shape.rotary
        return named


def pair_linear(
    model: DecoderModel, token_ids: Tensor, hidden: Tensor, given: PairInput, weight: Weight, pair: Tensor | None
) -> Tensor:
    """Run the first linear of a head that takes the embedding of a token and a hidden state.

    Args:
        token_ids: int64 [T].
        hidden: [T, hidden_size].
        given: the input that the linear takes; its table is the model's embedding.
        pair: that input, where the op that picked the tokens made it.
    """
    if pair is not None:
        return ops.norm_linear(pair, None, weight)
    ids, table = table_rows(token_ids, given.table, model.tensor_parallel, model.sizes.vocab_size)
    return ops.pair_linear(ids, hidden, given._replace(table=table), weight)


def if_plain(model: DecoderModel, given: PairInput, weight: Weight) -> PairInput | None:
    """Return a `Head.pair_input`; None where the first linear is FP8, or its vocabulary is split over ranks."""
    return given if model.tensor_parallel.size == 1 and weight.scale is None else None


def named_tensors(part: Any, prefix: str = "") -> dict[str, Tensor]:
    """Return the tensors of a dataclass of weights, or of a tuple of them, by dotted name for the read-set."""
    if isinstance(part, torch.Tensor):
        return {prefix: part}
    if isinstance(part, Weight):
        return part.named_tensors(prefix)
    items: list[tuple[object, Any]] = []
    if isinstance(part, tuple):
        items = list(enumerate(cast("tuple[Any, ...]", part)))
    elif is_dataclass(part):
        items = [(field.name, getattr(part, field.name)) for field in fields(part)]
    named: dict[str, Tensor] = {}
    for name, value in items:
        named |= named_tensors(value, f"{prefix}.{name}" if prefix else str(name))
    return named
