"""Multi-token prediction heads (DeepSeek-V3, arXiv:2412.19437, section 2.2): small modules trained with their target.

    x      = eh_proj(cat(enorm(embed(token)), hnorm(hidden)))
    carry  = norm(layer(x))
    logits = lm_head(carry)

`hidden` is the target's final hidden state at step 0, the previous step's carry after that. A checkpoint's only module
computes every step; of several, module k computes step k.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from specgraph import ops
from specgraph.attention import Attend
from specgraph.models.config import ModelConfig
from specgraph.models.layers import (
    DecoderLayer,
    attention_layers,
    decoder_blocks,
    linear,
    rms_norm,
    shortened,
)
from specgraph.models.protocol import DraftOutput, HeadKind, OutputProjection
from specgraph.models.split import table_rows, whole_logits
from specgraph.ops.linear import PairInput, Weight


@dataclass(frozen=True, slots=True)
class MtpModule:
    """Tensors of one module."""

    embed_norm: Tensor
    """[hidden_size]"""
    hidden_norm: Tensor
    """[hidden_size]"""
    projection: Weight
    """[hidden_size, 2 * hidden_size]: columns of the embedding first."""
    layer: DecoderLayer
    norm: Tensor
    """[hidden_size]"""

    def named_tensors(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors by dotted name, for the read-set."""
        return {
            f"{prefix}.embed_norm": self.embed_norm,
            f"{prefix}.hidden_norm": self.hidden_norm,
            **self.projection.named_tensors(f"{prefix}.projection"),
            f"{prefix}.norm": self.norm,
            **self.layer.named_tensors(f"{prefix}.layer"),
        }


class MtpHead:
    """An MTP drafter. Implements `DraftHead` with its first module, and `StepwiseHead` with all of them."""

    aux_layers: Sequence[int] = ()
    """Empty: it takes the target's final hidden state."""
    draft_to_target: Tensor | None = None
    """It drafts over the target's vocabulary."""

    def __init__(
        self,
        config: ModelConfig,
        modules: Sequence[MtpModule],
        embed_tokens: Tensor,
        lm_head: Tensor,
    ) -> None:
        """embed_tokens and lm_head [vocab_size, hidden_size], the target's."""
        self.config = config
        self.modules = tuple(modules)
        self.embed_tokens = embed_tokens
        self.lm_head = lm_head
        self.num_modules = len(self.modules)
        """1: the module is used at every step. More: one per step."""
        self.kind: HeadKind = "modules" if self.num_modules > 1 else "chain"
        self.attention_layers = attention_layers(config, self.num_modules, embed_tokens.device)
        self.hidden_size = self.aux_size = config.hidden_size
        self.draft_vocab_size, self.dtype = config.vocab_size, embed_tokens.dtype
        self.tensor_parallel = config.tensor_parallel

    def shorten(self, max_model_len: int) -> None:
        """See `LlamaTarget.shorten`."""
        self.config = self.config.with_max_position(max_model_len)
        self.attention_layers = shortened(self.attention_layers, self.config, self.embed_tokens.device)

    def combine(self, aux_hidden: Tensor) -> Tensor:
        """[T, hidden_size], unchanged."""
        return aux_hidden

    def forward(
        self, token_ids: Tensor, hidden: Tensor, attend: Attend, rows: Tensor | None = None, pair: Tensor | None = None
    ) -> DraftOutput:
        """Run the first module: token_ids int64 [T] (the token after each row's position), hidden [T,
        hidden_size]."""
        return self._module(0, token_ids, hidden, attend, rows, pair)

    def forward_step(self, step: int, token_ids: Tensor, hidden: Tensor, attend: Attend) -> DraftOutput:
        """Run module `step`; see `StepwiseHead.forward_step`."""
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
        module, eps = self.modules[step], self.config.rms_norm_eps
        if pair is None:
            ids, table = table_rows(token_ids, self.embed_tokens, self.tensor_parallel, self.config.vocab_size)
            taken = PairInput(table, module.embed_norm, module.hidden_norm, eps)
            x = ops.pair_linear(ids, hidden, taken, module.projection)
        else:
            x = ops.norm_linear(pair, None, module.projection)
        shape = self.attention_layers[step]
        x = decoder_blocks(x, [module.layer], [shape], attend, eps, rows, first_index=step)[-1]
        normed = rms_norm(x, module.norm, eps)
        return DraftOutput(normed, normed)

    @property
    def pair_input(self) -> PairInput | None:
        """See `Head.pair_input`; of the first module."""
        module = self.modules[0]
        if self.tensor_parallel.size > 1 or module.projection.scale is not None:
            return None
        return PairInput(self.embed_tokens, module.embed_norm, module.hidden_norm, self.config.rms_norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden_size] -> [N, vocab_size]."""
        return whole_logits(linear(hidden, self.lm_head), self.tensor_parallel, self.draft_vocab_size)

    @property
    def projection(self) -> OutputProjection | None:
        """See `Head.projection`."""
        return OutputProjection(None, 0.0, self.lm_head, self.draft_vocab_size, self.tensor_parallel)

    def weights(self) -> Mapping[str, Tensor]:
        """Everything that the head reads, the rotary table too."""
        named: dict[str, Tensor] = {"embed_tokens": self.embed_tokens, "lm_head": self.lm_head}
        rotary = self.attention_layers[0].rotary
        if rotary is not None:
            named["rotary"] = rotary
        for index, module in enumerate(self.modules):
            named.update(module.named_tensors(f"modules.{index}"))
        return named
