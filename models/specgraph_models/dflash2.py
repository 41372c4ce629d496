"""The DFlash2 draft head: DFlash's block with local convolutions. Tokens are chosen in order among candidates.

convolution   of a sublayer's input and of its output, causal inside a block: tap i weighs the row i places before, by
              a kernel per channel plus a kernel per group of channels, which is a projection of the input
candidates    = top k of lm_head(norm(block))
score         = logit + sum(predecessor[token before] * (P @ hidden state) * successor[candidate])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from specgraph import ops
from specgraph.attention import Attend
from specgraph.draft.logits import NextLogits, RowLogits
from specgraph.ops.linear import Weight
from specgraph_models import ops as model_ops
from specgraph_models.decoder import named_tensors
from specgraph_models.dflash import BlockParts, InOrderHead
from specgraph_models.layers import rms_norm, split_heads
from specgraph_models.split import embedding, row_parallel

NO_CANDIDATE = -1e30
"""The logit of a token that is no candidate. It is finite, so that every block of columns has a largest logit."""


@dataclass(frozen=True, slots=True)
class Convolution:
    """The convolutions before and after one sublayer."""

    base: Tensor
    """[2, taps, hidden_size]"""
    projection: Weight
    """[2 * taps * groups, hidden_size]"""

    def before(self, x: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Return the sublayer's input, from x [T, hidden_size] in blocks of `rows` rows, and its output's kernels."""
        shape = 2, self.base.shape[1], self.projection.matrix.shape[0] // (2 * self.base.shape[1])
        groups = ops.norm_linear(x, None, self.projection).view(-1, rows, *shape, 1)
        kernels = self.base.view(*shape, -1) + groups
        return self.after(x, kernels[:, :, 0], rows), kernels[:, :, 1]

    def after(self, x: Tensor, kernels: Tensor, rows: int) -> Tensor:
        """Return the sublayer's output x [T, hidden_size], convolved.

        kernels: [T / rows, rows, taps, groups, channels of a group].
        """
        blocks = x.view(-1, rows, *kernels.shape[3:])
        out = blocks * kernels[:, :, 0]
        for tap in range(1, min(kernels.shape[2], rows)):
            out[:, tap:].addcmul_(blocks[:, :-tap], kernels[:, tap:, tap])
        return out.view(x.shape)


@dataclass(frozen=True, slots=True)
class Selector:
    """The weights that choose among candidates, of rank r."""

    top_k: int
    predecessor: Tensor
    """[vocab_size, r]"""
    successor: Tensor
    """[draft_vocab_size, r]"""
    projection: Weight
    """[r, hidden_size]"""


class DFlash2Head(InOrderHead):
    """A DFlash2 drafter. Implements `BlockHead`."""

    def __init__(
        self, block: BlockParts, convolutions: Sequence[tuple[Convolution, Convolution]], selector: Selector
    ) -> None:
        """convolutions: of the attention and of the MLP, for each layer."""
        super().__init__(block)
        self.convolutions, self.selector = tuple(convolutions), selector

    def keep_tokens(self, draft_ids: Tensor) -> None:
        super().keep_tokens(draft_ids)
        whole = self.selector
        successor = whole.successor[draft_ids.to(whole.successor.device)]
        self.selector = replace(whole, successor=successor, top_k=min(whole.top_k, len(draft_ids)))

    def forward(self, token_ids: Tensor, attend: Attend) -> Tensor:
        """See `ParallelHead.forward`. The result is after the final norm."""
        rows, eps, ranks = token_ids.shape[-1], self.sizes.rms_norm_eps, self.tensor_parallel
        x = embedding(token_ids.flatten(), self.embed_tokens, ranks, self.sizes.vocab_size)
        for index, (layer, shape, (attention, mlp)) in enumerate(
            zip(self.layers, self.attention_layers, self.convolutions, strict=True)
        ):
            assert layer.input_norm is not None
            taken, kernels = attention.before(rms_norm(x, layer.input_norm, eps), rows)
            query, key, value, _ = split_heads(ops.norm_linear(taken, None, layer.qkv), layer, shape, eps)
            attended = attend(index, query, key, value).reshape(x.shape[0], -1)
            x = x + attention.after(row_parallel(attended, layer.output, None, ranks), kernels, rows)
            taken, kernels = mlp.before(rms_norm(x, layer.post_norm, eps), rows)
            inner = model_ops.norm_gate_up(taken, None, layer.gate_up)
            x = x + mlp.after(row_parallel(inner, layer.down, None, ranks), kernels, rows)
        return rms_norm(x, self.tensors.norm, eps)

    def in_order(self, hidden: Tensor) -> NextLogits:
        rows, base = self.base_logits(hidden)
        selector = self.selector
        scores, candidates = base.topk(selector.top_k, dim=-1)
        projected = ops.norm_linear(rows.flatten(0, 1), None, selector.projection)
        successors = functional.embedding(candidates, selector.successor)
        successors *= projected.view(*candidates.shape[:2], 1, -1)
        base.fill_(max(NO_CANDIDATE, torch.finfo(base.dtype).min))

        def following(row: int, token_ids: Tensor) -> RowLogits:
            before = selector.predecessor[token_ids][..., None]
            chosen = torch.baddbmm(scores[row][..., None], successors[row], before)[..., 0]
            return RowLogits(base[row].scatter_(1, candidates[row], chosen))

        return following

    def weights(self) -> Mapping[str, Tensor]:
        own = named_tensors(self.convolutions, "convolutions") | named_tensors(self.selector, "selector")
        return {**own, **super().weights()}
