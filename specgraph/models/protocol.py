"""What a model must offer to be a target or a chain drafter. Plain tensor code: no device names, no graph calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specgraph.attention import Attend, AttentionLayer


class TargetOutput(NamedTuple):
    """One target pass over T rows."""

    hidden: Tensor
    """[T, hidden_size], after the final norm: what `logits` takes."""
    aux_hidden: Tensor
    """[T, num_aux * hidden_size]: the states that the drafter asked for, side by side; `hidden` if it named none."""


class Target(Protocol):
    """A causal language model whose attention is supplied by the caller."""

    @property
    def attention_layers(self) -> Sequence[AttentionLayer]: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...

    def forward(self, token_ids: Tensor, attend: Attend, aux_layers: Sequence[int] = ()) -> TargetOutput:
        """token_ids int64 [T] -> hidden states. Rotation happens in `attend`, by the metadata's positions.

        `aux_layers`: hidden state k is the residual stream that enters layer k (the output of the first k layers),
        so 0 is the embedding and num_layers the last layer's output before the final norm. None named: the drafter
        takes `hidden` itself, the state after the final norm (EAGLE-1, MTP).
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden_size] -> [N, vocab_size]."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """Every tensor that `forward` and `logits` read, by name: the read-set of a captured graph."""
        ...


class DraftOutput(NamedTuple):
    """One drafter pass over T rows."""

    hidden: Tensor
    """[T, hidden_size]: what `logits` takes."""
    carry: Tensor
    """[T, hidden_size]: what the next step takes as `hidden`."""


class DraftHead(Protocol):
    """An autoregressive drafter that feeds its own hidden state forward (EAGLE, EAGLE-3, MTP)."""

    @property
    def attention_layers(self) -> Sequence[AttentionLayer]: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def draft_vocab_size(self) -> int: ...
    @property
    def aux_layers(self) -> Sequence[int]: ...
    @property
    def aux_size(self) -> int:
        """Columns of the target hidden states that `combine` takes."""
        ...

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def draft_to_target(self) -> Tensor | None:
        """int64 [draft_vocab_size]: target id = draft id + draft_to_target[draft id]; None when vocabularies agree."""
        ...

    def combine(self, aux_hidden: Tensor) -> Tensor:
        """[T, aux_size] -> [T, hidden_size]: the target's hidden states as the drafter's first `hidden`."""
        ...

    def forward(self, token_ids: Tensor, hidden: Tensor, attend: Attend) -> DraftOutput:
        """token_ids int64 [T] (the token *after* each row's position), hidden [T, hidden_size]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden_size] -> [N, draft_vocab_size]."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """Every tensor that this drafter reads, by name."""
        ...
