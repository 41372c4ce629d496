"""The DFlash draft head: it fills a block of mask tokens in one pass, with non-causal attention to target states.

context   = hidden_norm(fc(cat(aux hidden states of the target)))    once per target row
K, V      of every layer: from `context` for rows before the block, from the layer's own input for the block's rows
block     = embed(sampled token, mask, mask, ...)                    through all layers, attention not causal
logits    = lm_head(norm(block))                        row j predicts the token at its own position (or the next)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from specgraph import ops
from specgraph.attention import Attend, Store
from specgraph.draft.block import BlockKind
from specgraph.draft.parallel import ParallelKind
from specgraph.ops.linear import Weight
from specgraph_models.config import ModelConfig
from specgraph_models.decoder import AuxDecoder, AuxWeights
from specgraph_models.layers import DecoderLayer, rms_norm
from specgraph_models.split import embedding


def in_one_tensor(layers: Sequence[DecoderLayer]) -> tuple[tuple[DecoderLayer, ...], Tensor | None]:
    """Put the layers' packed projections into one tensor, so that one product makes the context of all layers.

    Returns:
        The layers, with `qkv` as views of the tensor, and the tensor [num_layers, rows, hidden_size]. If a projection
        has a bias or is FP8, the layers are unchanged and the tensor is None.
    """
    if any(layer.qkv.bias is not None or layer.qkv.scale is not None for layer in layers):
        return tuple(layers), None
    packed = torch.stack([layer.qkv.matrix for layer in layers])
    return tuple(replace(layer, qkv=Weight(own)) for layer, own in zip(layers, packed.unbind(), strict=True)), packed


class BlockParts(NamedTuple):
    """The parts of a `DFlashHead`, as in a checkpoint."""

    sizes: ModelConfig
    weights: AuxWeights
    layers: Sequence[DecoderLayer]
    aux_layers: Sequence[int]
    block_size: int
    """The rows of a block: the sampled token, which is the anchor, and masks."""
    mask_token_id: int
    sample_from_anchor: bool = False
    """The anchor's row predicts a token too."""

    @property
    def draft_vocab_size(self) -> int:
        """The size of the drafter's vocabulary."""
        offsets = self.weights.draft_to_target
        return self.sizes.vocab_size if offsets is None else offsets.shape[0]


class DFlashHead(AuxDecoder):
    """A DFlash drafter. Implements `ParallelHead`."""

    kind = ParallelKind()

    def __init__(self, block: BlockParts, *, in_one: bool = True) -> None:
        """block: see `AuxDecoder` and `ParallelHead`. in_one: `in_one_tensor` may copy the packed projections."""
        layers, self._qkv = in_one_tensor(block.layers) if in_one else (tuple(block.layers), None)
        super().__init__(block.sizes, block.weights, layers, block.aux_layers, causal=False)
        self.mask_token_id, self.sample_from_anchor = block.mask_token_id, block.sample_from_anchor
        self.max_speculative_tokens = block.block_size - (not block.sample_from_anchor)

    def combine(self, aux_hidden: Tensor) -> Tensor:
        return rms_norm(super().combine(aux_hidden), self.tensors.hidden_norm, self.sizes.rms_norm_eps)

    def store_context(self, context: Tensor, store: Store) -> None:
        """Store each layer's keys and values for the rows of context [T, hidden_size]."""
        eps = self.sizes.rms_norm_eps
        for index, (packed, layer, shape) in enumerate(
            zip(self._context_kv(context), self.layers, self.attention_layers, strict=True)
        ):
            key, value = packed.chunk(2, dim=-1)
            key = key.view(-1, shape.num_kv_heads, shape.head_dim)
            if layer.key_norm is not None:
                key = rms_norm(key, layer.key_norm, eps)
            store(index, key, value.view(-1, shape.num_kv_heads, shape.head_dim))

    def _context_kv(self, context: Tensor) -> Sequence[Tensor]:
        """Return the keys, then values, of context [T, hidden_size] per layer: [T, 2 * num_kv_heads * head_dim]."""
        shape = self.attention_layers[0]
        skip = shape.num_heads * shape.head_dim  # the query's rows of a packed projection
        if self._qkv is not None:
            weights = self._qkv[:, skip:].transpose(1, 2)
            return torch.bmm(context.expand(len(self.layers), *context.shape), weights).unbind()
        return [ops.norm_linear(context, None, layer.qkv.rows(slice(skip, None))) for layer in self.layers]

    def forward(self, token_ids: Tensor, attend: Attend) -> Tensor:
        x = embedding(token_ids.flatten(), self.embed_tokens, self.tensor_parallel, self.sizes.vocab_size)
        # `logits` applies the final norm, fused with the projection.
        return self.run_layers(x, attend)[-1]


class InOrderHead(DFlashHead):
    """A block with tokens that are drawn one after the other, from the block's states after the final norm.

    Subclasses implement `BlockHead`: how a token depends on the tokens before it.
    """

    kind = BlockKind()
    has_confidence = False

    def __init__(self, block: BlockParts, *, in_one: bool = True) -> None:
        super().__init__(block, in_one=in_one)
        self.output_norm = None  # `forward` applies it

    def forward(self, token_ids: Tensor, attend: Attend) -> Tensor:
        """Run `DFlashHead.forward`, then the final norm."""
        return rms_norm(super().forward(token_ids, attend), self.tensors.norm, self.sizes.rms_norm_eps)

    def base_logits(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the predicting rows of blocks [R, n, hidden_size], and their logits by lm_head.

        They are [K, R, hidden_size] and [K, R, draft_vocab_size].
        """
        rows = hidden.transpose(0, 1)
        rows = (rows if self.sample_from_anchor else rows[1:]).contiguous()
        return rows, self.logits(rows.flatten(0, 1)).view(*rows.shape[:2], -1)

    def confidence(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """See `BlockHead.confidence`. It is not called if `has_confidence` is False."""
        raise AssertionError(f"{type(self).__name__} has no confidence")
