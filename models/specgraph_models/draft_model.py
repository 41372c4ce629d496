"""An independent language model as a draft head. It reads the target's tokens, but no hidden states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from specgraph.attention import Attend, AttentionLayer
from specgraph.draft.chain import DraftModelKind
from specgraph.draft.logits import OutputProjection
from specgraph.draft.protocol import DraftOutput
from specgraph.errors import ConfigError
from specgraph.ops.linear import PairInput
from specgraph_models.decoder import cut_offsets
from specgraph_models.layers import take_rows
from specgraph_models.llama import LlamaTarget


class DraftModelHead:
    """A language model with the target's vocabulary. It ignores the hidden states passed to it.

    Implements `DraftHead`: a row takes the token *after* its position, as in every head. It stores its key and value at
    that token's own position.
    """

    kind = DraftModelKind()
    projection: OutputProjection | None = None
    pair_input: PairInput | None = None
    aux_layers: Sequence[int] = ()
    draft_to_target: Tensor | None = None

    def __init__(self, model: LlamaTarget, target_hidden_size: int, draft_vocab_size: int | None = None) -> None:
        """
        Args:
            model: its embedding has a row for each of the target's tokens.
            target_hidden_size: the columns of the target's hidden states, which `combine` takes and ignores.
            draft_vocab_size: only this number of first tokens is drafted, as the others are padding. None drafts all.
        """
        if model.recurrent_layers:
            raise ConfigError(
                f"a draft model of architecture {model.architecture} has recurrent layers, whose states are kept for "
                "targets alone: draft with a model without them, or another kind of drafter"
            )
        self.model = model
        if draft_vocab_size is not None and draft_vocab_size < model.vocab_size:
            self.draft_to_target = torch.zeros(draft_vocab_size, dtype=torch.int64, device=model.embed_tokens.device)
        self.aux_size = target_hidden_size
        self.hidden_size, self.dtype, self.vocab_size = model.hidden_size, model.dtype, model.vocab_size
        self.draft_vocab_size, self.tensor_parallel = draft_vocab_size or model.vocab_size, model.tensor_parallel
        self.ranks = model.ranks

    def keep_tokens(self, draft_ids: Tensor) -> None:
        """See `CutHead.keep_tokens`."""
        self.draft_to_target = cut_offsets(draft_ids, self.draft_to_target).to(self.model.lm_head.device)
        self.model.cut_output(draft_ids)
        self.draft_vocab_size = len(draft_ids)

    @property
    def attention_layers(self) -> Sequence[AttentionLayer]:
        return self.model.attention_layers

    @attention_layers.setter
    def attention_layers(self, layers: Sequence[AttentionLayer]) -> None:
        self.model.attention_layers = tuple(layers)

    def attention_shapes(self) -> Sequence[AttentionLayer]:
        """Return `DecoderModel.attention_shapes` of the model."""
        return self.model.attention_shapes()

    def shorten(self, max_model_len: int) -> None:
        self.model.shorten(max_model_len)

    def combine(self, aux_hidden: Tensor) -> Tensor:
        """Return zeros [T, hidden_size]."""
        return aux_hidden.new_zeros(aux_hidden.shape[0], self.hidden_size)

    def forward(self, token_ids: Tensor, hidden: Tensor, attend: Attend, rows: Tensor | None = None) -> DraftOutput:
        """Run the model over token_ids, int64 [T], the token after each row's position."""
        out = self.model.forward(token_ids, attend).hidden
        if rows is not None:
            out = take_rows(out, rows)
        return DraftOutput(out, out)

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden [N, hidden_size] to logits [N, draft_vocab_size]."""
        return self.model.logits(hidden)[:, : self.draft_vocab_size].contiguous()

    def weights(self) -> Mapping[str, Tensor]:
        own = {} if self.draft_to_target is None else {"draft_to_target": self.draft_to_target}
        return {**self.model.weights(), **own}

    def rank_parts(self) -> frozenset[str]:
        """Return `DecoderModel.rank_parts` of the model."""
        return self.model.rank_parts()
