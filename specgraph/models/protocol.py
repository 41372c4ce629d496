"""What a model must offer to be a target or a chain drafter. Plain tensor code: no device names, no graph calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from specgraph.attention import Attend, AttentionLayer, Store


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


class Head(Protocol):
    """What every drafter has: sizes, its use of the target's hidden states, and logits over its own vocabulary."""

    @property
    def attention_layers(self) -> Sequence[AttentionLayer]: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def draft_vocab_size(self) -> int: ...
    @property
    def aux_layers(self) -> Sequence[int]:
        """Which target hidden states it takes (see `Target.forward`); none: the final one."""
        ...

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
        """[T, aux_size] -> [T, hidden_size]: the target's hidden states as the drafter takes them."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden_size] -> [N, draft_vocab_size]."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """Every tensor that this drafter reads, by name."""
        ...


class DraftHead(Head, Protocol):
    """An autoregressive drafter that feeds its own hidden state forward (EAGLE, EAGLE-3, MTP).

    Its first `hidden` is what `combine` makes of the target's.
    """

    def forward(self, token_ids: Tensor, hidden: Tensor, attend: Attend, rows: Tensor | None = None) -> DraftOutput:
        """token_ids int64 [T] (the token *after* each row's position), hidden [T, hidden_size].

        `rows` (int64 [R]): only these rows are wanted of the output, which then has R rows. Every row's key and value
        are written all the same.
        """
        ...


@runtime_checkable
class GreedyHead(Protocol):
    """A `DraftHead` that picks its most likely token without leaving logits in memory."""

    def draft_greedy(self, hidden: Tensor, draft_step: Tensor, token_ids: Tensor, draft_token_ids: Tensor) -> None:
        """As `specgraph.kernels.draft_greedy` of `logits(hidden)`."""
        ...


@runtime_checkable
class OffsetHead(Protocol):
    """A `DraftHead` that keeps each key and value at the position of the token that it takes, not of the row.

    So a whole language model drafts as it was trained, from a sequence's first token on. Its prompts are prefilled with
    their own tokens, every one of them; in a propose, rows stand `position_offset` places further.
    """

    @property
    def position_offset(self) -> int:
        """1: a row takes the token after its position."""
        ...


@runtime_checkable
class StepwiseHead(Protocol):
    """A `DraftHead` with one module a step (MTP with several modules): K may not exceed `num_modules`.

    Module k predicts the token k + 2 places after its row from the k-th hidden state and the token k + 1 places after.
    So that each module's KV cache is complete, step k runs over *every* row of step 0: token ids moved up by one in
    each request with the latest draft token in the last place, hidden states carried row by row, positions and slots as
    in step 0. A prompt is prefilled through all modules likewise. With `num_modules` 1 it is a plain `DraftHead`.
    """

    @property
    def num_modules(self) -> int: ...

    def forward_step(self, step: int, token_ids: Tensor, hidden: Tensor, attend: Attend) -> DraftOutput:
        """As `DraftHead.forward`, by module `step`, whose attention layer is number `step`."""
        ...


@runtime_checkable
class ParallelHead(Head, Protocol):
    """A drafter that fills a block of 1 + K rows a request in one pass (DFlash).

    A propose is: `combine` and `store_context` over the rows of the target's round, at the rows' own positions and
    slots; then `forward` over blocks that begin one position after the last accepted row: the token that the target
    sampled, then K times `mask_token_id`. Attention is not causal in any layer: a row sees the context and its whole
    block. The block's own keys and values lie in the slots that the next round's context overwrites.
    """

    @property
    def max_speculative_tokens(self) -> int:
        """The K that the drafter was trained with; a smaller one works."""
        ...

    @property
    def mask_token_id(self) -> int: ...

    def store_context(self, context: Tensor, store: Store) -> None:
        """context [T, hidden_size]: store each layer's keys and values of these rows."""
        ...

    def forward(self, token_ids: Tensor, attend: Attend) -> Tensor:
        """token_ids int64 [R * (1 + K)] -> [R * (1 + K), hidden_size]: row j >= 1 of a block predicts draft token j."""
        ...
