"""The head of the n-gram drafter. It has no model: it drafts from earlier places in the request's own text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specgraph.attention import AttentionLayer
from specgraph.config import check_ngrams
from specgraph.draft.protocol import HeadKind
from specgraph.ops.linear import PairInput
from specgraph.validation import Count, NgramTokens, checked_fields


@checked_fields
@dataclass(frozen=True, slots=True)
class NgramHead:
    """A head without a model: it finds an earlier place of a text's last n-gram, and drafts the tokens that followed
    there (`ops.ngram_propose`). Implements `Head`.

    Its KV cache has a token id per slot in place of a key. So a text is written, shared, moved and freed with the
    blocks of its request, like any drafter's keys. Nothing attends to it.

    Raises:
        ConfigError: a number is out of range, or the shortest n-gram is longer than the longest.
    """

    draft_vocab_size: Count
    """The size of the target's vocabulary: the drafts are the target's token ids."""
    prompt_lookup_max: NgramTokens = 5
    """Tokens of the longest n-gram that is searched for."""
    prompt_lookup_min: NgramTokens = 1
    """Tokens of the shortest n-gram that is searched for. A shorter match does not count."""

    kind: HeadKind = field(default="ngram", init=False)
    dtype: torch.dtype = field(default=torch.int32, init=False)
    """The dtype of token ids in the cache."""
    hidden_size: int = field(default=0, init=False)
    """It takes no hidden states of the target, and has none."""
    aux_layers: Sequence[int] = field(default=(), init=False)
    aux_size: int = field(default=0, init=False)
    draft_to_target: Tensor | None = field(default=None, init=False)
    pair_input: PairInput | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        check_ngrams(self.prompt_lookup_max, self.prompt_lookup_min)

    @property
    def attention_layers(self) -> Sequence[AttentionLayer]:
        """Return one layer. It only describes the shape of the cache: one number per slot."""
        return (AttentionLayer(num_heads=1, num_kv_heads=1, head_dim=1, scale=1.0, latent=True, no_rotary=True),)

    def attention_shapes(self) -> Sequence[AttentionLayer]:
        """Return `attention_layers`: there is no rotary table to leave out."""
        return self.attention_layers

    def weights(self) -> Mapping[str, Tensor]:
        return {}
