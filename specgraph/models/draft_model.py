"""An independent language model as a draft head: it reads the target's tokens, and none of its hidden states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from specgraph.attention import Attend
from specgraph.models.layers import take_rows
from specgraph.models.llama import LlamaTarget
from specgraph.models.logits import OutputProjection
from specgraph.models.protocol import DraftOutput, HeadKind
from specgraph.ops.linear import PairInput


class DraftModelHead:
    """A language model with the target's vocabulary. It ignores the hidden states passed to it.

    Implements `DraftHead`: a row takes the token *after* its position, as in every head, and stores its key and value
    at that token's own position.
    """

    kind: HeadKind = "draft_model"
    projection: OutputProjection | None = None
    pair_input: PairInput | None = None
    aux_layers: Sequence[int] = ()
    draft_to_target: Tensor | None = None

    def __init__(self, model: LlamaTarget, target_hidden_size: int) -> None:
        """target_hidden_size: columns of the target's hidden states, which `combine` takes and ignores."""
        self.model = model
        self.attention_layers, self.aux_size = model.attention_layers, target_hidden_size
        self.hidden_size, self.draft_vocab_size, self.dtype = model.hidden_size, model.vocab_size, model.dtype

    def shorten(self, max_model_len: int) -> None:
        self.model.shorten(max_model_len)
        self.attention_layers = self.model.attention_layers

    def combine(self, aux_hidden: Tensor) -> Tensor:
        """Zeros [T, hidden_size]."""
        return aux_hidden.new_zeros(aux_hidden.shape[0], self.hidden_size)

    def forward(self, token_ids: Tensor, hidden: Tensor, attend: Attend, rows: Tensor | None = None) -> DraftOutput:
        """token_ids int64 [T], the token after each row's position."""
        out = self.model.forward(token_ids, attend).hidden
        if rows is not None:
            out = take_rows(out, rows)
        return DraftOutput(out, out)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden_size] -> [N, vocab_size]."""
        return self.model.logits(hidden)

    def weights(self) -> Mapping[str, Tensor]:
        return self.model.weights()
