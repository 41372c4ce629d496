"""The EAGLE-3 draft head (arXiv:2503.01840): one decoder layer over the next token's embedding and target features.

first hidden = fc(cat(aux hidden states of the target))
x            = cat(input_layernorm(embed(token)), hidden_norm(hidden))      input of the first layer's projections
residual     = hidden, or hidden_norm(hidden) with norm_before_residual
carry        = residual + attention + mlp                                   the next draft step's hidden
logits       = lm_head(norm(carry))                                         over the draft vocabulary

P-EAGLE (arXiv:2602.01469) has the same layers, and drafts all tokens in one forward pass. Rows after the last sampled
token take a mask token and fc(mask_hidden).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from specgraph.attention import Attend
from specgraph.draft.chain import ChainKind
from specgraph.draft.kind import Kind
from specgraph.draft.masked import MaskedKind
from specgraph.draft.protocol import DraftOutput
from specgraph.ops.linear import PairInput
from specgraph_models.config import ModelConfig
from specgraph_models.decoder import AuxDecoder, AuxWeights
from specgraph_models.layers import DecoderLayer, rms_norm


class Eagle3Head(AuxDecoder):
    """An EAGLE-3 drafter. Implements `PairHead`."""

    kind: Kind[Any] = ChainKind()

    def __init__(
        self,
        sizes: ModelConfig,
        weights: AuxWeights,
        layers: Sequence[DecoderLayer],
        aux_layers: Sequence[int],
        *,
        norm_before_residual: bool = False,
        norm_output: bool = False,
    ) -> None:
        """
        Args:
            sizes, weights, layers: as in `AuxDecoder`.
            aux_layers: see `Head`. If empty, the head takes the target's final hidden state.
            norm_before_residual: the first layer's residual is the normalised hidden state.
            norm_output: the final norm is applied to the carry (EAGLE 3.1).
        """
        super().__init__(sizes, weights, layers, aux_layers)
        self.norm_before_residual, self.norm_output = norm_before_residual, norm_output
        hidden_norm = None if norm_before_residual else weights.hidden_norm
        self._input = PairInput(self.embed_tokens, self.layers[0].input_norm, hidden_norm, sizes.rms_norm_eps)
        if not norm_before_residual:
            self.takes_pairs(self._input, self.layers[0].qkv)

    def forward(
        self, token_ids: Tensor, hidden: Tensor, attend: Attend, rows: Tensor | None = None, pair: Tensor | None = None
    ) -> DraftOutput:
        """See `PairHead.forward`. token_ids int64 [T], the token after each row's position."""
        eps, weight = self.sizes.rms_norm_eps, self.layers[0].qkv
        if self.norm_before_residual:
            hidden = rms_norm(hidden, self.tensors.hidden_norm, eps)
        qkv = self.pair_linear(token_ids, hidden, self._input, weight, pair)
        x = self.run_layers(hidden, attend, rows, qkv)[-1]
        # `logits` applies the final norm, fused with the projection.
        return DraftOutput(x, rms_norm(x, self.tensors.norm, eps) if self.norm_output else x)


class PEagleHead(Eagle3Head):
    """A P-EAGLE drafter. Implements `MaskedHead`."""

    kind = MaskedKind()

    def __init__(
        self,
        sizes: ModelConfig,
        weights: AuxWeights,
        layers: Sequence[DecoderLayer],
        aux_layers: Sequence[int],
        *,
        mask_token_id: int,
        mask_hidden: Tensor,
        **switches: bool,
    ) -> None:
        """mask_hidden: [aux_size], in place of target hidden states. `combine` runs over it once, here."""
        super().__init__(sizes, weights, layers, aux_layers, **switches)
        self.mask_token_id = mask_token_id
        self.mask_hidden = self.combine(mask_hidden[None])[0]

    def weights(self) -> Mapping[str, Tensor]:
        return {**super().weights(), "mask_hidden": self.mask_hidden}
