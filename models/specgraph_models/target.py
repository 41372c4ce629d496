"""The protocol of a target: plain tensor code without graph calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specgraph.attention import Attend, AttentionLayer
from specgraph.draft.logits import OutputProjection
from specgraph.parallel import RankPlace
from specgraph_models.delta import DeltaConfig, Recur


class TargetOutput(NamedTuple):
    """The hidden states of a target's forward pass over T rows."""

    hidden: Tensor
    """[T, hidden_size], after the final norm: the input of `logits`."""
    aux_hidden: Tensor
    """[T, len(aux_layers) * hidden_size]: the states of `aux_layers`, concatenated. `hidden` if there are none."""


class Target(Protocol):
    """A causal language model. The caller supplies its attention."""

    @property
    def projection(self) -> OutputProjection | None:
        """Return the linear that `logits` computes. None if `logits` does anything else."""
        ...

    @property
    def attention_layers(self) -> Sequence[AttentionLayer]: ...
    @property
    def ranks(self) -> RankPlace | None:
        """Return this rank's place, if ranks split the model: its passes then have collectives. None if it is whole."""
        ...

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def recurrent_layers(self) -> Sequence[DeltaConfig]:
        """Return the sizes of the layers with a state per request in place of keys and values. Empty if it has none."""
        ...

    def forward(
        self, token_ids: Tensor, attend: Attend, aux_layers: Sequence[int] = (), recur: Recur | None = None
    ) -> TargetOutput:
        """Run the model over token_ids, int64 [T]. `attend` rotates, by the positions of its metadata.

        Args:
            aux_layers: the hidden states to return as `aux_hidden`. State k is the residual stream that enters layer k:
                0 is the embedding, num_layers is the last layer's output before the final norm, and num_layers + 1 is
                the state after the final norm. If empty, `aux_hidden` is `hidden` (EAGLE-1, MTP).
            recur: runs rows through the states of recurrent layers. None if the model has none.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden [N, hidden_size] to logits [N, vocab_size]."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """Return every tensor that `forward` and `logits` read, by name. They join the read set of captured graphs."""
        ...
