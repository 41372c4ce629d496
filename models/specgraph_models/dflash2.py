"""The DFlash2 draft head: DFlash's block with local convolutions. Tokens are chosen in order among candidates.

convolution   of a sublayer's input and of its output, causal inside a block: tap i weighs the row i places before, by
              a kernel per channel plus a kernel per group of channels, which is a projection of the input
candidates    = top k of lm_head(norm(block))
score         = logit + sum(predecessor[token before] * (P @ hidden state) * successor[candidate])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from specgraph import ops
from specgraph.attention import Attend
from specgraph.draft.logits import NextLogits, RowLogits
from specgraph.ops.draft_sampling import Drafts
from specgraph.ops.linear import Norm, Weight
from specgraph_models import ops as model_ops
from specgraph_models.decoder import named_tensors
from specgraph_models.dflash import BlockParts, InOrderHead
from specgraph_models.layers import rms_norm, split_heads
from specgraph_models.split import embedding, row_parallel


@dataclass(frozen=True, slots=True)
class Convolution:
    """The convolutions before and after one sublayer."""

    base: Tensor
    """[2, taps, hidden_size]"""
    projection: Weight
    """[2 * taps * groups, hidden_size]"""

    def before(self, x: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Return the sublayer's input, from x [T, hidden_size] in blocks of `rows` rows.

        Also returns the kernels per group of its output: [T, taps * groups].
        """
        before, after = ops.norm_linear(x, None, self.projection).chunk(2, dim=1)
        return model_ops.convolve_blocks(x, self.base[0], before, rows), after

    def after(self, x: Tensor, groups: Tensor, rows: int, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """Return the residual plus the sublayer's output x [T, hidden_size], convolved, and the norm of this sum."""
        return model_ops.convolve_and_norm(x, self.base[1], groups, rows, residual, norm)


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


@dataclass(frozen=True, kw_only=True)
class CandidateLogits(RowLogits):
    """The logits of one row's candidates in each of R blocks."""

    shortlist: model_ops.Shortlist

    def tensor(self) -> Tensor:
        return self.shortlist.whole()

    def draw(self, drafts: Drafts) -> bool:
        model_ops.draft_from_shortlist(self.shortlist, drafts)
        return True


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
        norms = [layer.input_norm for layer in self.layers]
        assert norms[0] is not None
        normed = rms_norm(x, norms[0], eps)
        for index, (layer, shape, (attention, mlp), norm) in enumerate(
            zip(self.layers, self.attention_layers, self.convolutions, (*norms[1:], self.tensors.norm), strict=True)
        ):
            assert norm is not None
            taken, groups = attention.before(normed, rows)
            query, key, value, _ = split_heads(ops.norm_linear(taken, None, layer.qkv), layer, shape, eps)
            attended = attend(index, query, key, value).reshape(x.shape[0], -1)
            out = row_parallel(attended, layer.output, None, ranks)
            x, normed = attention.after(out, groups, rows, x, Norm(layer.post_norm, eps))
            taken, groups = mlp.before(normed, rows)
            out = row_parallel(model_ops.norm_gate_up(taken, None, layer.gate_up), layer.down, None, ranks)
            x, normed = mlp.after(out, groups, rows, x, Norm(norm, eps))
        return normed

    def in_order(self, hidden: Tensor) -> NextLogits:
        rows, base = self.base_logits(hidden)
        whole, steps = self.selector, rows.shape[:2]
        scores, candidates = (t.view(*steps, -1) for t in model_ops.top_logits(base.flatten(0, 1), whole.top_k))
        states = ops.norm_linear(rows.flatten(0, 1), None, whole.projection).view(*steps, -1)
        tables = whole.predecessor, whole.successor

        def following(row: int, token_ids: Tensor) -> RowLogits:
            shortlist = model_ops.Shortlist(candidates[row], scores[row], states[row], *tables, token_ids)
            return CandidateLogits(scores[row], shortlist=shortlist)

        return following

    def weights(self) -> Mapping[str, Tensor]:
        own = named_tensors(self.convolutions, "convolutions") | named_tensors(self.selector, "selector")
        return {**own, **super().weights()}
