"""The EAGLE-3 draft head (arXiv:2503.01840): one decoder layer over the next token's embedding and target features.

first hidden = fc(cat(aux hidden states of the target))
x            = cat(input_layernorm(embed(token)), hidden_norm(hidden))      input of the first layer's projections
residual     = hidden, or hidden_norm(hidden) with norm_before_residual
carry        = residual + attention + mlp                                   the next step's hidden
logits       = lm_head(norm(carry))                                         over the draft vocabulary

P-EAGLE (arXiv:2602.01469) has the same layers and drafts all tokens in one pass: rows after the last sampled token take
a mask token and fc(mask_hidden).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specgraph import ops
from specgraph.attention import Attend
from specgraph.models.config import ModelConfig
from specgraph.models.layers import (
    DecoderLayer,
    attention_layers,
    decoder_blocks,
    rms_norm,
    shortened,
)
from specgraph.models.protocol import DraftOutput, HeadKind, OutputProjection
from specgraph.models.split import table_rows, whole_logits
from specgraph.ops.linear import PairInput, Weight


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """Sizes of the decoder layers, which target states the head takes, and where it normalises."""

    model: ModelConfig
    """Sizes of the decoder layers; `vocab_size` is the target's."""
    target_hidden_size: int
    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    """Target layers whose input the head takes; empty: it takes the target's final hidden state."""
    norm_before_residual: bool = False
    """The first layer's residual is the normalised hidden state."""
    norm_output: bool = False
    """The carry is normalised by the final norm (EAGLE 3.1)."""


@dataclass(frozen=True, slots=True)
class Eagle3Weights:
    """Tensors of a head beside its decoder layers."""

    embed_tokens: Tensor
    """[target vocab, hidden_size]: the target's tensor when shared."""
    hidden_norm: Tensor
    """[hidden_size]"""
    norm: Tensor
    """[hidden_size]"""
    lm_head: Tensor
    """[draft_vocab_size, hidden_size]"""
    fc: Weight | None
    """[hidden_size, aux_size]; None when the target's hidden states are taken unchanged."""
    input_norm: Tensor | None = None
    """[aux_size]: one norm over all aux states (`norm_before_fc`)."""
    fc_norms: tuple[Tensor, ...] = ()
    """[target_hidden_size] each: one norm for each aux state (`fc_norm`)."""
    draft_to_target: Tensor | None = None
    """int64 [draft_vocab_size], offsets; None when the vocabularies agree."""


class Eagle3Head:
    """An EAGLE-3 drafter. Implements `DraftHead`."""

    kind: HeadKind = "chain"

    def __init__(self, config: Eagle3Config, weights: Eagle3Weights, layers: Sequence[DecoderLayer]) -> None:
        self.config = config
        self.tensors = weights
        self.layers = tuple(layers)
        model = config.model
        self.attention_layers = attention_layers(model, len(self.layers), weights.embed_tokens.device)
        self.hidden_size, self.draft_vocab_size = model.hidden_size, config.draft_vocab_size
        self.aux_layers = config.aux_layers
        self.aux_size = max(1, len(config.aux_layers)) * config.target_hidden_size
        self.tensor_parallel = model.tensor_parallel
        self.dtype, self.draft_to_target = weights.embed_tokens.dtype, weights.draft_to_target

    def shorten(self, max_model_len: int) -> None:
        """See `LlamaTarget.shorten`."""
        model = self.config.model.with_max_position(max_model_len)
        self.config = replace(self.config, model=model)
        self.attention_layers = shortened(self.attention_layers, model, self.tensors.embed_tokens.device)

    def combine(self, aux_hidden: Tensor) -> Tensor:
        """[T, aux_size] -> [T, hidden_size]."""
        tensors, eps = self.tensors, self.config.model.rms_norm_eps
        if tensors.input_norm is not None:
            aux_hidden = rms_norm(aux_hidden, tensors.input_norm, eps)
        if tensors.fc_norms:
            parts = aux_hidden.split(self.config.target_hidden_size, dim=-1)
            aux_hidden = torch.cat(
                [rms_norm(part, norm, eps) for part, norm in zip(parts, tensors.fc_norms, strict=True)], dim=-1
            )
        return aux_hidden if tensors.fc is None else ops.norm_linear(aux_hidden, None, tensors.fc)

    def forward(
        self, token_ids: Tensor, hidden: Tensor, attend: Attend, rows: Tensor | None = None, pair: Tensor | None = None
    ) -> DraftOutput:
        """token_ids int64 [T], the token after each row's position; see `PairHead.forward`."""
        tensors, eps, shapes = self.tensors, self.config.model.rms_norm_eps, self.attention_layers
        first, hidden_norm = self.layers[0], tensors.hidden_norm
        if self.config.norm_before_residual:
            hidden, hidden_norm = rms_norm(hidden, hidden_norm, eps), None
        if pair is None:
            ids, table = table_rows(token_ids, tensors.embed_tokens, self.tensor_parallel, self.config.model.vocab_size)
            qkv = ops.pair_linear(ids, hidden, PairInput(table, first.input_norm, hidden_norm, eps), first.qkv)
        else:
            qkv = ops.norm_linear(pair, None, first.qkv)
        x = decoder_blocks(hidden, self.layers, shapes, attend, eps, rows, qkv)[-1]
        # The final norm is part of `logits`, where it is fused with the projection.
        return DraftOutput(x, rms_norm(x, tensors.norm, eps) if self.config.norm_output else x)

    @property
    def pair_input(self) -> PairInput | None:
        """See `Head.pair_input`."""
        tensors, first = self.tensors, self.layers[0]
        if self.config.norm_before_residual or self.tensor_parallel.size > 1 or first.qkv.scale is not None:
            return None
        return PairInput(tensors.embed_tokens, first.input_norm, tensors.hidden_norm, self.config.model.rms_norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden_size] -> [N, draft_vocab_size]."""
        return whole_logits(self._output.logits(hidden), self.tensor_parallel, self.draft_vocab_size)

    @property
    def projection(self) -> OutputProjection | None:
        """See `Head.projection`."""
        return self._output

    @property
    def _output(self) -> OutputProjection:
        tensors, eps = self.tensors, self.config.model.rms_norm_eps
        return OutputProjection(tensors.norm, eps, tensors.lm_head, self.draft_vocab_size, self.tensor_parallel)

    def weights(self) -> Mapping[str, Tensor]:
        """Everything that the head reads, the rotary table and the vocabulary offsets too."""
        tensors = self.tensors
        named: dict[str, Tensor] = {
            "embed_tokens": tensors.embed_tokens,
            "hidden_norm": tensors.hidden_norm,
            "norm": tensors.norm,
            "lm_head": tensors.lm_head,
        }
        optional = {
            **({} if tensors.fc is None else tensors.fc.named_tensors("fc")),
            "input_norm": tensors.input_norm,
            "draft_to_target": tensors.draft_to_target,
            "rotary": self.attention_layers[0].rotary,
            **{f"fc_norm.{i}": norm for i, norm in enumerate(tensors.fc_norms)},
        }
        named.update({name: tensor for name, tensor in optional.items() if tensor is not None})
        for index, layer in enumerate(self.layers):
            named.update(layer.named_tensors(f"layers.{index}"))
        return named


class PEagleHead(Eagle3Head):
    """A P-EAGLE drafter. Implements `MaskedHead`."""

    kind: HeadKind = "masked"

    def __init__(
        self,
        config: Eagle3Config,
        weights: Eagle3Weights,
        layers: Sequence[DecoderLayer],
        mask_token_id: int,
        mask_hidden: Tensor,
    ) -> None:
        """mask_hidden: [aux_size], as target hidden states; it is combined once, here."""
        super().__init__(config, weights, layers)
        self.mask_token_id = mask_token_id
        self.mask_hidden = self.combine(mask_hidden[None])[0]

    def weights(self) -> Mapping[str, Tensor]:
        """Return those of EAGLE-3, and the masked rows' hidden state."""
        return {**super().weights(), "mask_hidden": self.mask_hidden}
