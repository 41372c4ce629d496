"""The Domino draft head: DFlash's block. A recurrent state over the drawn tokens corrects the logits of the next one.

state     = GRU(state, embed(token before))                          zeros before the anchor
logits    = lm_head(norm(block)) + W2 @ silu(W1 @ (hidden state, state))    of rows from `uncorrected_rows` on
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from specgraph import ops
from specgraph.draft.logits import NextLogits, RowLogits
from specgraph.ops.linear import Weight
from specgraph_models.decoder import named_tensors
from specgraph_models.dflash import BlockParts, InOrderHead
from specgraph_models.split import embedding


@dataclass(frozen=True, slots=True)
class Correction:
    """The recurrent cell over a block's tokens, and the MLP that corrects logits. G is the size of the cell's state."""

    taken: Weight
    """[3 * G, hidden_size], applied to the token's embedding: reset gate, update gate, candidate."""
    kept: Weight
    """[3 * G, G], applied to the state."""
    inner: Weight
    """[inner size, hidden_size + G]"""
    output: Weight
    """[draft_vocab_size, inner size]"""


class DominoHead(InOrderHead):
    """A Domino drafter. Implements `BlockHead`."""

    def __init__(self, block: BlockParts, correction: Correction, uncorrected_rows: int) -> None:
        """uncorrected_rows: the logits of this number of first predicting rows are not corrected."""
        super().__init__(block)
        self.correction, self._uncorrected_rows = correction, uncorrected_rows

    def keep_tokens(self, draft_ids: Tensor) -> None:
        super().keep_tokens(draft_ids)
        output = self.correction.output
        self.correction = replace(self.correction, output=output.rows(draft_ids.to(output.matrix.device)))

    def in_order(self, hidden: Tensor) -> NextLogits:
        rows, base = self.base_logits(hidden)
        correction, state = self.correction, hidden.new_zeros(hidden.shape[0], self.correction.kept.matrix.shape[1])

        def following(row: int, token_ids: Tensor) -> RowLogits:
            nonlocal state
            token = embedding(token_ids, self.embed_tokens, self.tensor_parallel, self.sizes.vocab_size)
            state = _gru(token, state, correction)
            if row < self._uncorrected_rows:
                return RowLogits(base[row])
            inner = functional.silu(ops.norm_linear(torch.cat((rows[row], state), dim=-1), None, correction.inner))
            return RowLogits(base[row], inner, correction.output)

        return following

    def weights(self) -> Mapping[str, Tensor]:
        return {**named_tensors(self.correction, "correction"), **super().weights()}


def _gru(token: Tensor, state: Tensor, cell: Correction) -> Tensor:
    """Return the state after a token [R, hidden_size]."""
    size = state.shape[1]
    of_token = ops.norm_linear(token, None, cell.taken).split((2 * size, size), dim=-1)
    of_state = ops.norm_linear(state, None, cell.kept).split((2 * size, size), dim=-1)
    reset, update = torch.sigmoid(of_token[0] + of_state[0]).chunk(2, dim=-1)
    candidate = torch.tanh(torch.addcmul(of_token[1], reset, of_state[1]))
    return torch.addcmul(candidate, update, state - candidate)  # not every device has an op for lerp
