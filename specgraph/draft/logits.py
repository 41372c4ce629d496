"""The output projection of a model, and the logits of rows that are drawn one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from specgraph import ops
from specgraph.ops.linear import Norm, Weight
from specgraph.ops.tensor_forms import check_forms, dtype_of
from specgraph.parallel import RankPlace
from specgraph.validation import check

_FORMS = {"weight": "floats [vocab, in]", "norm": "floats [in] or None"}
_ROW_FORMS = {
    "matrix": "any [draft_vocab, in]",
    "base": "floats [R, draft_vocab]",
    "row_ids": "int64 [R] or None",
}


@dataclass(frozen=True, slots=True)
class OutputProjection:
    """The linear that gives a model's logits: rms_norm(hidden) @ weight.T."""

    norm: Tensor | None
    """[hidden_size]. None if there is no norm."""
    eps: float
    weight: Tensor
    """[vocabulary, hidden_size], or the rows of this rank's part of the vocabulary."""
    vocab_size: int | None = None
    """Tokens of the whole vocabulary. None if `weight` has a row for each of them."""
    tensor_parallel: RankPlace | None = None
    """This rank among those that each have a part of the vocabulary. None if it has all of it."""

    @property
    def lm_head(self) -> ops.LmHead:
        """Return the same linear in the form that the ops take."""
        return ops.LmHead(self.norm, self.eps, self.weight)

    @property
    def split_over(self) -> RankPlace | None:
        """Return the ranks over which the vocabulary is split. None if `weight` has all of it."""
        return None if self.vocab_size in (None, self.weight.shape[0]) else self.tensor_parallel

    def logits(self, hidden: Tensor) -> Tensor:
        """Turn hidden states, [N, hidden_size], into logits, [N, rows of `weight`]."""
        norm = None if self.norm is None else Norm(self.norm, self.eps)
        try:
            return ops.norm_linear(hidden, norm, Weight(self.weight))
        except (RuntimeError, TypeError, ValueError):
            check("OutputProjection.eps", self.eps, float)
            given = {"weight": self.weight, "norm": self.norm, "hidden": hidden}
            check_forms("OutputProjection.logits", given, _FORMS | {"hidden": f"{dtype_of(self.weight)} [rows, in]"})
            raise


@dataclass(frozen=True)
class RowLogits:
    """The logits of one row in each of R blocks: `base`, or `base + x @ weight.T` if there is an `x`.

    A device may draw tokens from the sum without storing it. The tensors are valid until the next row's are computed.
    """

    base: Tensor
    """[R, draft_vocab_size]"""
    x: Tensor | None = None
    """[R, in], or a table [rows, in] if `row_ids` is set. None if there is no product."""
    weight: Weight | None = None
    """[draft_vocab_size, in]"""
    row_ids: Tensor | None = None
    """int64 [R]: the row of `x` that each block takes. None if it takes its own."""

    @property
    def lm_head(self) -> ops.LmHead | None:
        """Return the linear that computes the logits from `x`, for the ops that draw. None if there is no product, or
        if its weight has a scale or a bias, which no kernel takes."""
        if self.weight is None or self.weight.scale is not None or self.weight.bias is not None:
            return None
        return ops.LmHead(None, 0.0, self.weight.matrix, self.base, self.row_ids)

    def draw(self, drafts: ops.Drafts) -> bool:
        """Draw the most likely tokens into `drafts` by an op of the head's own. Return False if it has none."""
        return False

    def tensor(self) -> Tensor:
        """Return the logits as one tensor, [R, draft_vocab_size]."""
        if self.x is None or self.weight is None:
            return self.base
        try:
            x = self.x if self.row_ids is None else functional.embedding(self.row_ids, self.x)
            return ops.norm_linear(x, None, self.weight, self.base)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            check("RowLogits.weight", self.weight, Weight)
            given = {"matrix": self.weight.matrix, "base": self.base, "x": self.x, "row_ids": self.row_ids}
            of = dtype_of(self.weight.matrix) if self.weight.scale is None else "floats"
            rows = "R" if self.row_ids is None else "rows"
            check_forms("RowLogits", given, _ROW_FORMS | {"x": f"{of} [{rows}, in]"})
            raise


NextLogits = Callable[[int, Tensor], RowLogits]
"""`following(row, token_ids)` returns the logits of one of the K rows that predict a token. It is called once for each
`row` from 0 to K - 1, in order. `token_ids`, int64 [R], are the tokens before the row: first the anchors, then the
latest draft tokens."""


def whole_rows(x: Tensor, ranks: RankPlace | None, columns: int) -> Tensor:
    """Gather rows that are split by columns among the ranks, such as logits: [N, this rank's columns] becomes
    [N, columns]."""
    if ranks is None or x.shape[-1] == columns:
        return x
    rows, part = x.shape
    gathered = ops.all_gather(x, ranks.group, ranks.size)
    return gathered.view(ranks.size, rows, part).transpose(0, 1).reshape(rows, columns)


def most_likely(logits: Tensor, ranks: RankPlace) -> Tensor:
    """Return the most likely token of each row over all ranks, int64 [N]. logits: [N, this rank's part of the
    vocabulary]."""
    own = ops.best_tokens(logits, ranks.rank * logits.shape[1])
    return ops.best_of(ops.all_gather(own, ranks.group, ranks.size).view(ranks.size, *own.shape))
