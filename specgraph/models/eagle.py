"""The EAGLE-1 draft head (arXiv:2401.15077): a decoder layer over embedding and hidden state, fused by one matrix.

The target's final hidden state is the first `hidden`; x = fc(cat(embed(token), hidden)); the first layer takes x
without a norm; there is no final norm, so its output is both what the head reads and the next step's `hidden`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from specgraph.attention import Attend
from specgraph.models.checkpoint_folder import CheckpointFolder
from specgraph.models.config import ModelConfig
from specgraph.models.config_source import ConfigSource
from specgraph.models.decoder_layer import DecoderLayer, attention_layers, decoder_block, load_decoder_layer
from specgraph.models.fit import check_same, drafter_config, shared_or_own
from specgraph.models.formats import DrafterFolder, DrafterFormat, DrafterReader
from specgraph.models.layers import greedy_head, linear, pair_linear
from specgraph.models.llama import LlamaTarget
from specgraph.models.protocol import DraftOutput


@dataclass(frozen=True, slots=True)
class EagleWeights:
    """Tensors of a head beside its decoder layers."""

    embed_tokens: Tensor
    """[vocab_size, hidden_size]: the target's tensor when shared."""
    fc: Tensor
    """[hidden_size, 2 * hidden_size]"""
    fc_bias: Tensor | None
    lm_head: Tensor
    """[vocab_size, hidden_size]: the target's."""


class EagleHead:
    """An EAGLE-1 drafter. Implements `DraftHead`."""

    aux_layers: Sequence[int] = ()
    """None: it takes the target's final hidden state."""
    draft_to_target: Tensor | None = None
    """It drafts over the target's vocabulary."""

    def __init__(
        self, config: ModelConfig, weights: EagleWeights, layers: Sequence[DecoderLayer], num_positions: int
    ) -> None:
        """num_positions: rows of the rotary table; the target's max_model_len."""
        self.config = config
        self.tensors = weights
        self.layers = tuple(layers)
        model = config.with_max_position(num_positions)
        self.attention_layers = attention_layers(model, len(self.layers), weights.embed_tokens.device)
        self.hidden_size = self.aux_size = config.hidden_size
        self.draft_vocab_size, self.dtype = weights.lm_head.shape[0], weights.embed_tokens.dtype

    def combine(self, aux_hidden: Tensor) -> Tensor:
        """[T, hidden_size], taken as it is."""
        return aux_hidden

    def forward(self, token_ids: Tensor, hidden: Tensor, attend: Attend, rows: Tensor | None = None) -> DraftOutput:
        """token_ids int64 [T] (the token after each row's position), hidden [T, hidden_size]."""
        tensors, eps = self.tensors, self.config.rms_norm_eps
        x = pair_linear(token_ids, tensors.embed_tokens, None, hidden, None, eps, tensors.fc, tensors.fc_bias)
        for index, layer in enumerate(self.layers):
            last = index == len(self.layers) - 1
            x = decoder_block(x, layer, self.attention_layers[index], index, attend, eps, rows if last else None)
        return DraftOutput(x, x)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden_size] -> [N, vocab_size]."""
        return linear(hidden, self.tensors.lm_head)

    def draft_greedy(self, hidden: Tensor, draft_step: Tensor, token_ids: Tensor, draft_token_ids: Tensor) -> None:
        """See `GreedyHead.draft_greedy`."""
        greedy_head(
            hidden, None, 0.0, self.tensors.lm_head, self.draft_to_target, draft_step, token_ids, draft_token_ids
        )

    def weights(self) -> Mapping[str, Tensor]:
        """Everything that the head reads, the rotary table too."""
        tensors = self.tensors
        named: dict[str, Tensor] = {
            "embed_tokens": tensors.embed_tokens,
            "fc": tensors.fc,
            "lm_head": tensors.lm_head,
        }
        optional = {"fc_bias": tensors.fc_bias, "rotary": self.attention_layers[0].rotary}
        named.update({name: tensor for name, tensor in optional.items() if tensor is not None})
        for index, layer in enumerate(self.layers):
            named.update(layer.named_tensors(f"layers.{index}"))
        return named


def recognise_eagle(source: ConfigSource, checkpoint: CheckpointFolder) -> DrafterFormat | None:
    """Their config.json looks like any small Llama's; the fusing matrix and the missing final norm tell."""
    if "fc.weight" in checkpoint and "layers.0.mlp.down_proj.weight" in checkpoint and "norm.weight" not in checkpoint:
        return DrafterFormat("eagle", "authors", "tensors fc and layers.0, no final norm")
    return None


def load_eagle(opened: DrafterFolder, target: LlamaTarget) -> EagleHead:
    """Read a head in the authors' layout (`fc`, `layers.0`) or that of speculators (`fusion_fc`, `transformer`).

    Raises:
        CheckpointError: a missing tensor, one of another shape, or a head that does not fit the target.
    """
    folder, head, layers = opened.checkpoint, opened.head, opened.layers
    config = drafter_config(layers, target, "llama")
    if head.boolean("layernorms", False):
        raise head.fail("layernorms", "is true; EAGLE heads with extra layer norms are not supported")
    hidden = config.hidden_size
    check_same("hidden size", hidden, target.hidden_size, layers.name)
    check_same("vocabulary", config.vocab_size, target.vocab_size, layers.name)
    fc = "fusion_fc" if "fusion_fc.weight" in folder else "fc"
    if "transformer.mlp.down_proj.weight" in folder:
        names = ["transformer"]
    else:
        names = [f"layers.{i}" for i in range(config.num_layers)]
    weights = EagleWeights(
        embed_tokens=shared_or_own(folder, "embed_tokens.weight", target.embed_tokens, config.vocab_size, hidden),
        fc=folder.weight(f"{fc}.weight", (hidden, 2 * hidden)),
        fc_bias=folder.optional_weight(f"{fc}.bias", (hidden,)),
        lm_head=shared_or_own(folder, "lm_head.weight", target.lm_head, config.vocab_size, hidden),
    )
    # The first layer's input norm is the identity; folders that still hold one never used it.
    loaded = [load_decoder_layer(folder, name, config, input_norm=i > 0) for i, name in enumerate(names)]
    return EagleHead(config, weights, loaded, target.max_model_len)


READER = DrafterReader("eagle", recognise_eagle, load_eagle)
