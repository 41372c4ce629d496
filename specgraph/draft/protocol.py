"""The protocols of draft heads: plain tensor code, no graph calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from specgraph.attention import Attend, AttentionLayer, Store
from specgraph.buffers import Buffers
from specgraph.draft.kind import Kind
from specgraph.draft.logits import NextLogits, OutputProjection
from specgraph.ops.linear import PairInput
from specgraph.parallel import RankPlace
from specgraph.validation import Count, Range

Size = Annotated[int, Range(0, 1 << 24)]
"""A size or a token id of a head."""


class DraftOutput(NamedTuple):
    """The result of a head's forward pass over T rows."""

    hidden: Tensor
    """[T, hidden_size]: the input of `logits`."""
    carry: Tensor
    """[T, hidden_size]: the `hidden` input of the next draft step."""


class Head(Protocol):
    """The members that all heads have: kind, sizes, weights and the target hidden states that they take."""

    @property
    def kind(self) -> Kind[Any]:
        """Return the way in which the head drafts, such as `ChainKind()`."""
        ...

    @property
    def attention_layers(self) -> Sequence[AttentionLayer]: ...
    @property
    def hidden_size(self) -> Size: ...
    @property
    def draft_vocab_size(self) -> Size: ...
    @property
    def aux_layers(self) -> Sequence[int]:
        """Return the numbers of the target's hidden states that the head takes, as
        `specgraph_models.target.Target.forward` counts them. Empty for the state after the final norm."""
        ...

    @property
    def aux_size(self) -> Size:
        """Columns of the target hidden states that `combine` takes."""
        ...

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def draft_to_target(self) -> Tensor | None:
        """int64 [draft_vocab_size]: target id = draft id + draft_to_target[draft id]. None if both vocabularies are
        the same."""
        ...

    @property
    def pair_input(self) -> PairInput | None:
        """Return how an op computes the input of a `PairHead`'s first linear. None if the head computes it itself."""
        ...

    @property
    def ranks(self) -> RankPlace | None:
        """Return this rank's place, if ranks split the model: its passes then have collectives. None if it is whole."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """Return every tensor that the head reads, by name."""
        ...


class ModelHead(Head, Protocol):
    """A head that is a model: it computes logits over the draft vocabulary."""

    @property
    def projection(self) -> OutputProjection | None:
        """Return the linear that `logits` computes: an op can then pick the token in the linear's epilogue. None if
        `logits` must be called."""
        ...

    def combine(self, aux_hidden: Tensor) -> Tensor:
        """Turn the target's hidden states, [T, aux_size], into the head's input, [T, hidden_size]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Turn hidden states, [N, hidden_size], into logits, [N, draft_vocab_size]."""
        ...


class DraftHead(ModelHead, Protocol):
    """An autoregressive head: draft step k + 1 takes the hidden state of draft step k (EAGLE, EAGLE-3, MTP).

    Draft step 0 takes the result of `combine`.
    """

    def forward(self, token_ids: Tensor, hidden: Tensor, attend: Attend, rows: Tensor | None = None) -> DraftOutput:
        """Run the head over T rows, and write the keys and values of all of them.

        Args:
            token_ids: int64 [T]: the token *after* each row's position.
            hidden: [T, hidden_size].
            rows: int64 [R]: the rows to return. The output then has R rows instead of T.
        """
        ...


class PairHead(DraftHead, Protocol):
    """A `DraftHead` that can be given the input of its first linear.

    The op that picks the token of one draft step computes this input for the next one.
    """

    def forward(
        self, token_ids: Tensor, hidden: Tensor, attend: Attend, rows: Tensor | None = None, pair: Tensor | None = None
    ) -> DraftOutput:
        """See `DraftHead.forward`. pair: [T, E + hidden_size]: `pair_input`, computed from the tokens and `hidden`."""
        ...


class ModulesHead(DraftHead, Protocol):
    """A `DraftHead` with one module per draft step (MTP with several modules). K may not exceed `num_modules`.

    For the row at position p, module k takes the hidden state of module k - 1 and token p + k + 1, and predicts token
    p + k + 2. Each module's KV cache must be complete, so draft step k runs over *all* rows of draft step 0:

    - The token ids of each request move up by one row. The latest draft token fills the last row.
    - Each row takes its own hidden state of the module before.
    - Positions and slots do not change.

    A propose of fewer than the largest K tokens runs all modules too, for their KV. So does prefill.

    In the last k rows of a request, module k takes draft tokens, which may be rejected. Draft step 0 therefore begins
    K - 1 rows before the target's rows (past rows), and writes their keys again with the tokens now known.
    """

    @property
    def num_modules(self) -> Count: ...

    def forward_step(self, step: int, token_ids: Tensor, hidden: Tensor, attend: Attend) -> DraftOutput:
        """Run `DraftHead.forward` of module `step`. Its attention layer has the number `step`."""
        ...


class MaskedHead(DraftHead, Protocol):
    """A `DraftHead` that drafts K tokens in one causal pass (P-EAGLE, arXiv:2602.01469).

    The rows of the target's pass run as in any `DraftHead`. K - 1 masked rows follow the row of each request's last
    sampled token. They take `mask_token_id` and `mask_hidden` in place of a token and a hidden state that are not known
    yet. Each predicts the token after its masked one.
    """

    @property
    def mask_token_id(self) -> Size: ...
    @property
    def mask_hidden(self) -> Tensor:
        """[hidden_size]: the hidden state of masked rows, in place of `combine`'s result."""
        ...


class ParallelHead(ModelHead, Protocol):
    """A head that fills a block of rows per request in one pass (DFlash).

    A propose first runs `combine` and `store_context` over the rows of the target's pass, at their own positions and
    slots. Then it runs `forward` over one block per request, which starts one position after the last accepted row.

    The first row of a block is the anchor, the token that the target sampled. K rows of `mask_token_id` follow it; with
    `sample_from_anchor` K - 1 rows. Attention is not causal in any layer: a row attends to the context and to its whole
    block. The block's keys and values go to slots that the next propose overwrites with its context.
    """

    @property
    def max_speculative_tokens(self) -> Count:
        """Return the largest K: the one that the head was trained with."""
        ...

    @property
    def mask_token_id(self) -> Size: ...
    @property
    def sample_from_anchor(self) -> bool:
        """Return whether a block has K rows that predict the token after their own, the anchor's row included.
        Otherwise K rows follow the anchor's, and predict the tokens at their own positions."""
        ...

    def store_context(self, context: Tensor, store: Store) -> None:
        """Store each layer's keys and values of T rows. context: [T, hidden_size], the result of `combine`."""
        ...

    def forward(self, token_ids: Tensor, attend: Attend) -> Tensor:
        """Turn the tokens of R blocks of n rows, int64 [R, n], into hidden states, [R * n, hidden_size]. The last K
        rows of each block predict a token."""
        ...


class BlockHead(ParallelHead, Protocol):
    """A `ParallelHead` that draws its tokens in order: the logits of each depend on the tokens before it (DSpark)."""

    def in_order(self, hidden: Tensor) -> NextLogits:
        """Return the function that computes the logits of one row after the other.

        hidden: [R, n, hidden_size], the rows of R blocks; the last K rows of each predict a token.
        """
        ...

    @property
    def has_confidence(self) -> bool:
        """Return whether the head estimates how likely each of its draft tokens is accepted."""
        ...

    def confidence(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """Return the chance that the target accepts each row's token if it accepted all before it: float32 [R, K].

        It must not depend on the row's own token: a verify that leaves out unlikely tokens is then lossless.

        Args:
            hidden: [R, K, hidden_size].
            token_ids: int64 [R, K]: the token before each row.
        """
        ...


class LogitsAdjustment(Buffers):
    """The base of an adjustment of draft logits by the requests' sampling parameters, such as top_k and penalties.

    Its tensors have a row per request. The caller owns and writes them; the graphs read them.
    """

    __slots__ = ()

    def check(self, requests: int, vocab_size: int | None, device: torch.device) -> None:
        """Raise ConfigError if it doesn't fit a drafter of `requests` requests with a target of `vocab_size` tokens.
        The vocabulary is None if the head doesn't reveal it."""
        raise NotImplementedError

    def adjusted_drafts(
        self, logits: Tensor, draft_to_target: Tensor | None, temperature: Tensor, drafted: Tensor | None = None
    ) -> Tensor:
        """Return adjusted logits, float32 [R * n, draft_vocab]. A graph captures the call.

        Args:
            logits: [R * n, draft_vocab]: n rows per request, all with the same context.
            temperature: float32 [R]; 0 is greedy.
            drafted: int64 [R, K]: draft tokens that count as tokens of the output. -1 stands for no token.
        """
        raise NotImplementedError
