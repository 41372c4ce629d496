"""The protocol of a target: plain tensor code, no graph calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specgraph.attention import Attend, AttentionLayer
from specgraph.draft.logits import OutputProjection


class TargetOutput(NamedTuple):
    """One target pass over T rows."""

    hidden: Tensor
    """[T, hidden_size], after the final norm: what `logits` takes."""
    aux_hidden: Tensor
    """[T, len(aux_layers) * hidden_size]: the requested states, concatenated; `hidden` when none was requested."""


class Target(Protocol):
    """A causal language model whose attention is supplied by the caller."""

    @property
    def projection(self) -> OutputProjection | None:
        """Return the linear that `logits` is; None where it is something else."""
        ...

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
        so 0 is the embedding, num_layers the last layer's output before the final norm, and num_layers + 1 the state
        after it. With no aux layers, `aux_hidden` is `hidden`, also the state after the final norm (EAGLE-1, MTP).
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden_size] -> [N, vocab_size]."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """Return every tensor that `forward` and `logits` read, by name: part of the read set of a captured graph."""
        ...
