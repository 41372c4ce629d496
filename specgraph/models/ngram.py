"""The n-gram drafter, which has no model: it finds the last tokens of a request earlier in the request's own text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specgraph.attention import AttentionLayer
from specgraph.models.protocol import HeadKind
from specgraph.ops.linear import PairInput
from specgraph.options import check_ngrams
from specgraph.validation import Count, NgramTokens, checked_fields


@checked_fields
@dataclass(frozen=True, slots=True)
class NgramHead:
    """A head that drafts what followed the last n-gram of a text before (`ops.ngram_propose`). Implements `Head`.

    Its KV cache has a token id per slot in place of a key: a text is written, shared, moved and forgotten with the
    blocks of its request, like any drafter's keys. Nothing attends to it.

    Raises:
        ConfigError: a number is out of range, or the shortest n-gram is longer than the longest.
    """

    draft_vocab_size: Count
    """The target's vocabulary."""
    prompt_lookup_max: NgramTokens = 5
    """Tokens of the longest n-gram that is looked for."""
    prompt_lookup_min: NgramTokens = 1
    """Tokens of the shortest one: where nothing as long is found, there is no match."""

    def __post_init__(self) -> None:
        check_ngrams(self.prompt_lookup_max, self.prompt_lookup_min)

    @property
    def kind(self) -> HeadKind:
        """Return "ngram"."""
        return "ngram"

    @property
    def attention_layers(self) -> Sequence[AttentionLayer]:
        """Return one layer, which is the shape of the cache: a number per slot."""
        return (AttentionLayer(num_heads=1, num_kv_heads=1, head_dim=1, scale=1.0, latent=True),)

    @property
    def dtype(self) -> torch.dtype:
        """Return that of token ids in the cache."""
        return torch.int32

    @property
    def hidden_size(self) -> int:
        """Return 0: it takes no hidden states, and has none."""
        return 0

    @property
    def aux_layers(self) -> Sequence[int]:
        """Return none."""
        return ()

    @property
    def aux_size(self) -> int:
        """Return 0."""
        return 0

    @property
    def draft_to_target(self) -> Tensor | None:
        """Return None: it drafts the target's tokens."""
        return None

    @property
    def pair_input(self) -> PairInput | None:
        """Return None."""
        return None

    def weights(self) -> Mapping[str, Tensor]:
        """Return none."""
        return {}
