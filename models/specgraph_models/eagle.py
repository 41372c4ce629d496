"""The EAGLE-1 draft head (arXiv:2401.15077): decoder layers over the token's embedding and a hidden state.

x      = fc(cat(embed(token), hidden))     hidden: the target's final state, then the carry of the draft step before
carry  = layers(x)                         the first layer has no input norm, and no final norm follows
logits = lm_head(carry)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from specgraph.attention import Attend
from specgraph.draft.chain import ChainKind
from specgraph.draft.protocol import DraftOutput
from specgraph.ops.linear import PairInput, Weight
from specgraph_models.config import ModelConfig
from specgraph_models.decoder import DraftDecoder
from specgraph_models.layers import DecoderLayer


class EagleHead(DraftDecoder):
    """An EAGLE-1 drafter. Implements `PairHead`."""

    kind = ChainKind()

    def __init__(
        self, sizes: ModelConfig, embed_tokens: Tensor, fc: Weight, layers: Sequence[DecoderLayer], lm_head: Tensor
    ) -> None:
        """fc [hidden_size, 2 * hidden_size]. The rest as in `DraftDecoder`."""
        super().__init__(sizes, embed_tokens, layers, lm_head)
        self.fc, self._input = fc, PairInput(embed_tokens, None, None, sizes.rms_norm_eps)
        self.takes_pairs(self._input, fc)

    def forward(
        self, token_ids: Tensor, hidden: Tensor, attend: Attend, rows: Tensor | None = None, pair: Tensor | None = None
    ) -> DraftOutput:
        """See `PairHead.forward`. token_ids int64 [T], the token after each row's position; hidden [T, hidden_size]."""
        x = self.pair_linear(token_ids, hidden, self._input, self.fc, pair)
        x = self.run_layers(x, attend, rows)[-1]
        return DraftOutput(x, x)

    def weights(self) -> Mapping[str, Tensor]:
        return {**self.fc.named_tensors("fc"), **super().weights()}
