"""The protocols of a target and of the head of a drafter: plain tensor code, no graph calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from specgraph.attention import Attend, AttentionLayer, Store
from specgraph.draft.logits import NextLogits, OutputProjection
from specgraph.ops.linear import PairInput
from specgraph.validation import Count, Range

Size = Annotated[int, Range(0, 1 << 24)]
"""A size or a token id of a head."""


class DraftOutput(NamedTuple):
    """One drafter pass over T rows."""

    hidden: Tensor
    """[T, hidden_size]: what `logits` takes."""
    carry: Tensor
    """[T, hidden_size]: what the next step takes as `hidden`."""


HeadKind = Literal["chain", "draft_model", "modules", "masked", "parallel", "block", "ngram"]
"""The way in which a head drafts, which chooses its draft program.

chain: each step takes the token and the hidden state of the step before (`DraftHead`: EAGLE, EAGLE-3, one MTP module).
draft_model: a chain whose row at position p, which takes token p + 1, stores its key and value at p + 1, that token's
position. An ordinary language model does so, and can then draft unchanged. Its prefill covers every prompt token, the
first included.
modules: one module per step (`StepwiseHead`). masked: all tokens in one causal pass (`MaskedHead`).
parallel: all tokens in one pass over a block (`ParallelHead`). block: the same pass, then tokens are drawn in order,
each knowing those before it (`BlockHead`).
ngram: no model at all (`NgramHead`): what followed the last tokens earlier in the text."""


class Head(Protocol):
    """All heads have sizes, and say which target hidden states they take."""

    @property
    def kind(self) -> HeadKind: ...
    @property
    def attention_layers(self) -> Sequence[AttentionLayer]: ...
    @property
    def hidden_size(self) -> Size: ...
    @property
    def draft_vocab_size(self) -> Size: ...
    @property
    def aux_layers(self) -> Sequence[int]:
        """Return which target hidden states it takes (see `Target.forward`); empty for the state after the final
        norm."""
        ...

    @property
    def aux_size(self) -> Size:
        """Columns of the target hidden states that `combine` takes."""
        ...

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def draft_to_target(self) -> Tensor | None:
        """int64 [draft_vocab_size]: target id = draft id + draft_to_target[draft id]; None when vocabularies agree."""
        ...

    @property
    def pair_input(self) -> PairInput | None:
        """Return the input of the first linear of a `PairHead`; None where the head makes it itself."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """Return every tensor that the head reads, by name."""
        ...


class ModelHead(Head, Protocol):
    """A head that is a model gives logits over the draft vocabulary."""

    @property
    def projection(self) -> OutputProjection | None:
        """Return the linear that `logits` is, so that an op can pick the token in its epilogue; None: `logits` is
        called."""
        ...

    def combine(self, aux_hidden: Tensor) -> Tensor:
        """[T, aux_size] -> [T, hidden_size]: turns the target's hidden states into the head's input."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden_size] -> [N, draft_vocab_size]."""
        ...


class DraftHead(ModelHead, Protocol):
    """An autoregressive head whose step k + 1 takes the hidden state of step k (EAGLE, EAGLE-3, MTP).

    Step 0 takes what `combine` returns.
    """

    def forward(self, token_ids: Tensor, hidden: Tensor, attend: Attend, rows: Tensor | None = None) -> DraftOutput:
        """token_ids int64 [T] (the token *after* each row's position), hidden [T, hidden_size].

        `rows` (int64 [R]): return only these rows of the output, which then has R rows. Keys and values are written
        for all T rows.
        """
        ...


class PairHead(DraftHead, Protocol):
    """A `DraftHead` whose later steps get the input of their first linear, made by the op that picked the token."""

    def forward(
        self, token_ids: Tensor, hidden: Tensor, attend: Attend, rows: Tensor | None = None, pair: Tensor | None = None
    ) -> DraftOutput:
        """See `DraftHead.forward`. pair: [T, E + hidden_size], what `pair_input` says of these tokens and `hidden`."""
        ...


class StepwiseHead(DraftHead, Protocol):
    """A `DraftHead` with one module per step (MTP with several modules): K may not exceed `num_modules`.

    For the row at position p, module k takes the hidden state of module k - 1 and token p + k + 1, and predicts token
    p + k + 2. To keep each module's KV cache complete, step k runs over *all* rows of step 0: in each request the
    token ids move up by one row and the latest draft token fills the last; hidden states carry over row by row;
    positions and slots stay those of step 0. A round that drafts fewer tokens than the largest K runs the other modules
    too, for their KV. Prefill runs through all modules in the same way.

    Module k takes draft tokens at the last k rows of a round. So step 0 begins with the K - 1 rows before the round,
    whose keys are written again with the tokens that are known now.
    """

    @property
    def num_modules(self) -> Count: ...

    def forward_step(self, step: int, token_ids: Tensor, hidden: Tensor, attend: Attend) -> DraftOutput:
        """`DraftHead.forward` of module `step`, which attends as layer `step`."""
        ...


class MaskedHead(DraftHead, Protocol):
    """A `DraftHead` that drafts K tokens in one causal pass (P-EAGLE, arXiv:2602.01469).

    The rows of the target's round run as in any `DraftHead`. K - 1 rows follow each request's last sampled token; they
    take `mask_token_id` and `mask_hidden`, and each predicts the token after the one that it stands for.
    """

    @property
    def mask_token_id(self) -> Size: ...
    @property
    def mask_hidden(self) -> Tensor:
        """[hidden_size]: what masked rows take in place of `combine`'s result."""
        ...


class ParallelHead(ModelHead, Protocol):
    """A head that fills a block of rows per request in one pass (DFlash).

    A propose first runs `combine` and `store_context` over the rows of the target's pass, at their own positions and
    slots; then `forward` over one block per request, starting one position after the last accepted row: the token that
    the target sampled, the anchor, then `mask_token_id`: K times, and where the anchor's row predicts the token after
    it (`sample_from_anchor`) K - 1 times. No layer's attention is causal: a row attends to the context and
    to its whole block. The block's keys and values go to slots that the next round's context overwrites.
    """

    @property
    def max_speculative_tokens(self) -> Count:
        """Return the K that the head was trained with; a smaller K works too."""
        ...

    @property
    def mask_token_id(self) -> Size: ...
    @property
    def sample_from_anchor(self) -> bool:
        """Return whether each of K rows predicts the token after its own; else K rows behind the anchor's predict the
        tokens at their own positions."""
        ...

    def store_context(self, context: Tensor, store: Store) -> None:
        """Store each layer's keys and values of these rows. context: [T, hidden_size], as `combine` returns it."""
        ...

    def forward(self, token_ids: Tensor, attend: Attend) -> Tensor:
        """token_ids int64 [R, n] -> [R * n, hidden_size]: n rows of a block, the last K of which predict a token."""
        ...


class BlockHead(ParallelHead, Protocol):
    """A `ParallelHead` whose tokens are drawn one after another, each from logits that know the former (DSpark)."""

    def in_order(self, hidden: Tensor) -> NextLogits:
        """hidden [R, n, hidden_size], the rows of a block per request, the last K of which predict -> what gives their
        logits."""
        ...

    @property
    def has_confidence(self) -> bool:
        """Return whether the head says how likely its draft tokens are accepted."""
        ...

    def confidence(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """hidden [R, K, hidden_size], token_ids int64 [R, K], the token before each row -> float32 [R, K], 0 to 1.

        The chance that the target accepts a row's token if it accepted all before it. It doesn't depend on that token,
        so that a verify which leaves out unlikely ones stays lossless.
        """
        ...
