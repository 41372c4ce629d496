"""The EAGLE-1 draft head (arXiv:2401.15077): decoder layers over the token's embedding and a hidden state.

x      = fc(cat(embed(token), hidden))     hidden: the target's final hidden state, then the previous step's carry
carry  = layers(x)                         the first layer has no input norm, and no final norm follows
logits = lm_head(carry)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from specgraph.attention import Attend
from specgraph.models.config import ModelConfig
from specgraph.models.decoder import DecoderModel, if_plain, pair_linear
from specgraph.models.layers import DecoderLayer
from specgraph.models.protocol import DraftOutput, HeadKind
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


class EagleHead(DecoderModel):
    """An EAGLE-1 drafter. Implements `PairHead`."""

    kind: HeadKind = "chain"
    aux_layers: Sequence[int] = ()
    """Empty: it takes the target's final hidden state."""
    draft_to_target: Tensor | None = None
    """Offsets of the draft vocabulary: none, it is the target's."""

    def __init__(self, config: ModelConfig, weights: EagleWeights, layers: Sequence[DecoderLayer]) -> None:
        super().__init__(config, weights.embed_tokens, layers, weights.lm_head)
        self.tensors = weights
        self.aux_size, self.draft_vocab_size = config.hidden_size, config.vocab_size

    def combine(self, aux_hidden: Tensor) -> Tensor:
        """[T, hidden_size], unchanged."""
        return aux_hidden

    def forward(
        self, token_ids: Tensor, hidden: Tensor, attend: Attend, rows: Tensor | None = None, pair: Tensor | None = None
    ) -> DraftOutput:
        """token_ids int64 [T] (the token after each row's position), hidden [T, hidden_size]."""
        x = pair_linear(self, token_ids, hidden, self._input, self.tensors.fc, pair)
        x = self.run_layers(x, attend, rows)[-1]
        return DraftOutput(x, x)

    @property
    def _input(self) -> PairInput:
        return PairInput(self.embed_tokens, None, None, self.sizes.rms_norm_eps)

    @property
    def pair_input(self) -> PairInput | None:
        """See `Head.pair_input`."""
        return if_plain(self, self._input, self.tensors.fc)

    def weights(self) -> Mapping[str, Tensor]:
        """Return everything that the head reads."""
        return {**self.tensors.fc.named_tensors("fc"), **super().weights()}
