"""Multi-token prediction heads (DeepSeek-V3, arXiv:2412.19437, section 2.2): small modules trained with their target.

    x      = eh_proj(cat(enorm(embed(token)), hnorm(hidden)))
    carry  = norm(layer(x))
    logits = lm_head(carry)

`hidden` is the target's final hidden state in draft step 0, and the carry of the draft step before in later ones
(vLLM's GLM-4.5 carries layer(x), before the norm). If a checkpoint has one module, it computes every draft step. Of
several modules, module k computes draft step k. vLLM's GLM-4.5, MiMo and DeepSeek-V3 use zeros for embed(token) at
position 0; here that token is embedded like every other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specgraph.attention import Attend
from specgraph.draft.chain import ChainKind
from specgraph.draft.logits import whole_rows
from specgraph.draft.modules import ModulesKind
from specgraph.draft.protocol import DraftOutput
from specgraph.ops.linear import PairInput, Weight
from specgraph_models.config import ModelConfig
from specgraph_models.decoder import DraftDecoder, named_tensors
from specgraph_models.layers import DecoderLayer, decoder_blocks, rms_norm


@dataclass(frozen=True, slots=True)
class MtpModule:
    """The tensors of one module."""

    embed_norm: Tensor
    """[hidden_size]"""
    hidden_norm: Tensor
    """[hidden_size]"""
    projection: Weight
    """[hidden_size, 2 * hidden_size]: columns of the embedding first. A host engine may split its rows over ranks."""
    layer: DecoderLayer
    norm: Tensor
    """[hidden_size]"""


class MtpHead(DraftDecoder):
    """An MTP drafter. Implements `PairHead` with its first module, and `ModulesHead` with all of them."""

    def __init__(
        self,
        config: ModelConfig,
        modules: Sequence[MtpModule],
        embed_tokens: Tensor,
        lm_head: Tensor,
        *,
        carries_normed: bool = True,
    ) -> None:
        """embed_tokens, lm_head: the target's, [vocab_size, hidden_size] each. carries_normed: the carry is after the
        norm."""
        super().__init__(config, embed_tokens, [module.layer for module in modules], lm_head)
        self._carries_normed = carries_normed
        self.modules, self.num_modules = tuple(modules), len(modules)
        self.kind = ModulesKind() if self.num_modules > 1 else ChainKind()  # a single one computes every draft step
        self.takes_pairs(self._input(self.modules[0]), self.modules[0].projection)

    def forward(
        self, token_ids: Tensor, hidden: Tensor, attend: Attend, rows: Tensor | None = None, pair: Tensor | None = None
    ) -> DraftOutput:
        """Run the first module. token_ids int64 [T], the token after each row's position; hidden [T, hidden_size]."""
        return self._module(0, token_ids, hidden, attend, rows, pair)

    def forward_step(self, step: int, token_ids: Tensor, hidden: Tensor, attend: Attend) -> DraftOutput:
        """Run module `step`; see `ModulesHead.forward_step`."""
        return self._module(step, token_ids, hidden, attend, None)

    def _module(
        self,
        step: int,
        token_ids: Tensor,
        hidden: Tensor,
        attend: Attend,
        rows: Tensor | None,
        pair: Tensor | None = None,
    ) -> DraftOutput:
        module, eps, shapes = self.modules[step], self.sizes.rms_norm_eps, self.attention_layers[step : step + 1]
        x = self.pair_linear(token_ids, hidden, self._input(module), module.projection, pair)
        x = whole_rows(x, self.tensor_parallel, self.hidden_size)
        x = decoder_blocks(x, [module.layer], shapes, attend, eps, rows, first_index=step)[-1]
        normed = rms_norm(x, module.norm, eps)
        return DraftOutput(normed, normed if self._carries_normed else x)

    def _input(self, module: MtpModule) -> PairInput:
        return PairInput(self.embed_tokens, module.embed_norm, module.hidden_norm, self.sizes.rms_norm_eps)

    def weights(self) -> Mapping[str, Tensor]:
        modules = named_tensors(self.modules, "modules")
        return {**{name: own for name, own in modules.items() if ".layer." not in name}, **super().weights()}

    def _rank_parts(self) -> tuple[Any, ...]:
        projections = (module.projection for module in self.modules)
        return *super()._rank_parts(), *(each for each in projections if each.matrix.shape[0] != self.hidden_size)
