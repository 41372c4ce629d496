"""The Domino draft head: DFlash's block. A recurrent state over the drawn tokens corrects the logits of the next one.

state     = GRU(state, embed(token before))                          zeros before the anchor
logits    = lm_head(norm(block)) + W2 @ silu(W1 @ (hidden state, state))    of rows from `uncorrected_rows` on
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor
from torch.nn import functional

from specgraph.draft.logits import NextLogits, RowLogits
from specgraph.ops.linear import Weight, dequantised
from specgraph_models import ops as model_ops
from specgraph_models.decoder import named_tensors
from specgraph_models.dflash import BlockParts, InOrderHead
from specgraph_models.split import table_rows


@dataclass(frozen=True, slots=True)
class Correction:
    """The recurrent cell over a block's tokens, and the MLP that corrects logits. G is the size of the cell's state."""

    taken: Weight
    """[3 * G, hidden_size], applied to the token's embedding: reset gate, update gate, candidate."""
    kept: Weight
    """[3 * G, G], applied to the state."""
    inner: Weight
    """[inner size, hidden_size + G]. A head multiplies an FP8 one out when it is made."""
    output: Weight
    """[draft_vocab_size, inner size]"""


class DominoHead(InOrderHead):
    """A Domino drafter. Implements `BlockHead`."""

    def __init__(self, block: BlockParts, correction: Correction, uncorrected_rows: int) -> None:
        """uncorrected_rows: the logits of this number of first predicting rows are not corrected."""
        super().__init__(block)
        matrix, _, scale = correction.inner
        if scale is not None:
            correction = replace(correction, inner=Weight(dequantised(matrix, scale, self.embed_tokens.dtype)))
        self.correction, self._uncorrected_rows = correction, uncorrected_rows

    def keep_tokens(self, draft_ids: Tensor) -> None:
        super().keep_tokens(draft_ids)
        output = self.correction.output
        self.correction = replace(self.correction, output=output.rows(draft_ids.to(output.matrix.device)))

    def in_order(self, hidden: Tensor) -> NextLogits:
        rows, base = self.base_logits(hidden)
        cell, inner = self.correction, self.correction.inner.matrix
        state = hidden.new_zeros(hidden.shape[0], cell.kept.matrix.shape[1])
        of_hidden, of_state = inner.split((hidden.shape[2], state.shape[1]), dim=1)
        known = functional.linear(rows, of_hidden)  # this part of the product needs no drawn token

        def following(row: int, token_ids: Tensor) -> RowLogits:
            nonlocal state
            table = table_rows(token_ids, self.embed_tokens, self.tensor_parallel, self.sizes.vocab_size)
            state = model_ops.next_state(*table, state, cell.taken, cell.kept)
            if row < self._uncorrected_rows:
                return RowLogits(base[row])
            return RowLogits(base[row], model_ops.silu_of_sum(state, of_state, known[row]), cell.output)

        return following

    def weights(self) -> Mapping[str, Tensor]:
        return {**named_tensors(self.correction, "correction"), **super().weights()}
