"""The EAGLE-1 draft head (arXiv:2401.15077): decoder layers over the token's embedding and a hidden state.

x      = fc(cat(embed(token), hidden))     hidden: the target's final hidden state, then the previous step's carry
carry  = layers(x)                         the first layer has no input norm, and no final norm follows
logits = lm_head(carry)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from specgraph import ops
from specgraph.attention import Attend
from specgraph.models.config import ModelConfig
from specgraph.models.layers import DecoderLayer, attention_layers, decoder_blocks, linear, shortened
from specgraph.models.protocol import DraftOutput, HeadKind, OutputProjection
from specgraph.models.split import table_rows, whole_logits
from specgraph.ops.linear import PairInput, Weight


@dataclass(frozen=True, slots=True)
class EagleWeights:
    """Tensors of a head beside its decoder layers."""

    embed_tokens: Tensor
    """[vocab_size, hidden_size]: the target's tensor when shared."""
    fc: Weight
    """[hidden_size, 2 * hidden_size]"""
    lm_head: Tensor
    """[vocab_size, hidden_size]: the target's."""


class EagleHead:
    """An EAGLE-1 drafter. Implements `DraftHead`."""

    kind: HeadKind = "chain"
    aux_layers: Sequence[int] = ()
    """Empty: it takes the target's final hidden state."""
    draft_to_target: Tensor | None = None
    """It drafts over the target's vocabulary."""

    def __init__(self, config: ModelConfig, weights: EagleWeights, layers: Sequence[DecoderLayer]) -> None:
        self.config = config
        self.tensors = weights
        self.layers = tuple(layers)
        self.attention_layers = attention_layers(config, len(self.layers), weights.embed_tokens.device)
        self.hidden_size = self.aux_size = config.hidden_size
        self.draft_vocab_size, self.dtype = config.vocab_size, weights.embed_tokens.dtype
        self.tensor_parallel = config.tensor_parallel

    def shorten(self, max_model_len: int) -> None:
        """See `LlamaTarget.shorten`."""
        self.config = self.config.with_max_position(max_model_len)
        self.attention_layers = shortened(self.attention_layers, self.config, self.tensors.embed_tokens.device)

    def combine(self, aux_hidden: Tensor) -> Tensor:
        """[T, hidden_size], unchanged."""
        return aux_hidden

    def forward(
        self, token_ids: Tensor, hidden: Tensor, attend: Attend, rows: Tensor | None = None, pair: Tensor | None = None
    ) -> DraftOutput:
        """token_ids int64 [T] (the token after each row's position), hidden [T, hidden_size]."""
        tensors, eps = self.tensors, self.config.rms_norm_eps
        if pair is None:
            ids, table = table_rows(token_ids, tensors.embed_tokens, self.tensor_parallel, self.config.vocab_size)
            x = ops.pair_linear(ids, hidden, PairInput(table, None, None, eps), tensors.fc)
        else:
            x = ops.norm_linear(pair, None, tensors.fc)
        x = decoder_blocks(x, self.layers, self.attention_layers, attend, eps, rows)[-1]
        return DraftOutput(x, x)

    @property
    def pair_input(self) -> PairInput | None:
        """See `Head.pair_input`."""
        whole = self.tensor_parallel.size == 1 and self.tensors.fc.scale is None
        return PairInput(self.tensors.embed_tokens, None, None, self.config.rms_norm_eps) if whole else None

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden_size] -> [N, vocab_size]."""
        return whole_logits(linear(hidden, self.tensors.lm_head), self.tensor_parallel, self.draft_vocab_size)

    @property
    def projection(self) -> OutputProjection | None:
        """See `Head.projection`."""
        return OutputProjection(None, 0.0, self.tensors.lm_head, self.draft_vocab_size, self.tensor_parallel)

    def weights(self) -> Mapping[str, Tensor]:
        """Everything that the head reads, the rotary table too."""
        tensors = self.tensors
        named: dict[str, Tensor] = {
            "embed_tokens": tensors.embed_tokens,
            **tensors.fc.named_tensors("fc"),
            "lm_head": tensors.lm_head,
        }
        if (rotary := self.attention_layers[0].rotary) is not None:
            named["rotary"] = rotary
        for index, layer in enumerate(self.layers):
            named.update(layer.named_tensors(f"layers.{index}"))
        return named
