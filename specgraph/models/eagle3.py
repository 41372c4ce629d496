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
from dataclasses import dataclass

import torch
from torch import Tensor

from specgraph import ops
from specgraph.attention import Attend
from specgraph.models.config import ModelConfig
from specgraph.models.decoder import DecoderModel, if_plain, named_tensors, pair_linear
from specgraph.models.layers import DecoderLayer, rms_norm
from specgraph.models.protocol import DraftOutput, HeadKind
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


class Eagle3Head(DecoderModel):
    """An EAGLE-3 drafter. Implements `PairHead`."""

    kind: HeadKind = "chain"

    def __init__(self, config: Eagle3Config, weights: Eagle3Weights, layers: Sequence[DecoderLayer]) -> None:
        super().__init__(config.model, weights.embed_tokens, layers, weights.lm_head, output_norm=weights.norm)
        self.config, self.tensors = config, weights
        self.draft_vocab_size, self.draft_to_target = config.draft_vocab_size, weights.draft_to_target
        self.aux_layers = config.aux_layers
        self.aux_size = max(1, len(config.aux_layers)) * config.target_hidden_size

    @property
    def output_vocab_size(self) -> int:
        """Columns of `logits`: the draft vocabulary."""
        return self.draft_vocab_size

    def combine(self, aux_hidden: Tensor) -> Tensor:
        """[T, aux_size] -> [T, hidden_size]."""
        tensors, eps = self.tensors, self.sizes.rms_norm_eps
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
        eps, weight = self.sizes.rms_norm_eps, self.layers[0].qkv
        if self.config.norm_before_residual:
            hidden = rms_norm(hidden, self.tensors.hidden_norm, eps)
        qkv = pair_linear(self, token_ids, hidden, self._input, weight, pair)
        x = self.run_layers(hidden, attend, rows, qkv)[-1]
        # The final norm is part of `logits`, where it is fused with the projection.
        return DraftOutput(x, rms_norm(x, self.tensors.norm, eps) if self.config.norm_output else x)

    @property
    def _input(self) -> PairInput:
        hidden_norm = None if self.config.norm_before_residual else self.tensors.hidden_norm
        return PairInput(self.embed_tokens, self.layers[0].input_norm, hidden_norm, self.sizes.rms_norm_eps)

    @property
    def pair_input(self) -> PairInput | None:
        """See `Head.pair_input`."""
        return None if self.config.norm_before_residual else if_plain(self, self._input, self.layers[0].qkv)

    def weights(self) -> Mapping[str, Tensor]:
        """Return everything that the head reads, the vocabulary offsets too."""
        return {**named_tensors(self.tensors), **super().weights()}


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
