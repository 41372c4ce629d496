"""The n-gram drafter has no model: it searches each request's own text for an earlier place of the last tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from torch import Tensor

from specgraph import ops
from specgraph.attention import AttentionLayer, AttentionMetadata
from specgraph.attention.rows import TextRows
from specgraph.buffers import Axes, PerRequest
from specgraph.capture import BatchDescriptor, MakeAttend, StepKind
from specgraph.config import check_ngrams
from specgraph.draft.buffers import Allocation, DraftBuffers, PassRows, PromptRows
from specgraph.draft.head_checks import HeadCheck
from specgraph.draft.kind import Kind
from specgraph.draft.program import DraftProgram
from specgraph.ops.linear import PairInput
from specgraph.parallel import RankPlace
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

    dtype: torch.dtype = field(default=torch.int32, init=False)
    """The dtype of token ids in the cache."""
    hidden_size: int = field(default=0, init=False)
    """It takes no hidden states of the target, and has none."""
    aux_layers: Sequence[int] = field(default=(), init=False)
    aux_size: int = field(default=0, init=False)
    draft_to_target: Tensor | None = field(default=None, init=False)
    pair_input: PairInput | None = field(default=None, init=False)
    ranks: RankPlace | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        check_ngrams(self.prompt_lookup_max, self.prompt_lookup_min)

    @property
    def kind(self) -> Kind[Any]:
        return NgramKind()

    @property
    def attention_layers(self) -> Sequence[AttentionLayer]:
        """Return one layer. It only describes the shape of the cache: one number per slot."""
        return (AttentionLayer(num_heads=1, num_kv_heads=1, head_dim=1, scale=1.0, latent=True, no_rotary=True),)

    def weights(self) -> Mapping[str, Tensor]:
        return {}


@dataclass(frozen=True, kw_only=True)
class NgramBuffers(DraftBuffers):
    """The tensors of a search in texts."""

    plan: TextRows
    token_ids: Annotated[Tensor, Axes("text")]
    """int64 [R * query_len]: the tokens of the batch's rows."""
    text: Annotated[AttentionMetadata, Axes("text")]
    """The positions and slots of these tokens in the texts."""
    lens: PerRequest
    """int32 [R]: the number of tokens in each text; 0 for inert requests."""


class NgramProgram(DraftProgram[NgramHead, NgramBuffers]):
    """Appends the sampled tokens to each request's text, then searches the text. There is no attention.

    Each token is stored at its own position; EAGLE heads store its key one position earlier.
    """

    step_kind: StepKind = "together"

    @property
    def prefill_passes(self) -> int:
        """0: a prompt's tokens are stored without attention."""
        return 0

    def allocate(self, new: Allocation) -> NgramBuffers:
        lens = new.zeros(new.requests, dtype=torch.int32)
        return NgramBuffers(**new.common(), token_ids=new.rows("text"), text=new.metadata("text"), lens=lens)

    def rows(self, query_len: int, num_speculative_tokens: int) -> PassRows:
        """Return the rows of the target's pass. Rejected rows get no slot, so their tokens enter no text."""
        return PassRows(TextRows.of(query_len, self.config.limits, self.position_offset), {"text": query_len})

    def num_steps(self, batch: BatchDescriptor) -> int:
        return 0

    def run(self, b: NgramBuffers, steps: Sequence[int], make_attend: MakeAttend) -> None:
        self.first(b, make_attend)

    def first(self, b: NgramBuffers, make_attend: MakeAttend) -> None:
        b.plan.fill(b.accepted, b.text.places, b.token_ids, b.lens)
        ops.keep_tokens(b.token_ids, b.text.slot_mapping, self._history)
        limits = self.head.prompt_lookup_min, self.head.prompt_lookup_max, self.config.max_model_len
        ops.ngram_propose(self._history, b.text.block_table, b.lens, *limits, b.draft_token_ids)

    def prefill(self, rows: PromptRows, make_attend: MakeAttend) -> None:
        tokens = rows.token_ids[: rows.metadata.slot_mapping.shape[0]]
        ops.keep_tokens(tokens, rows.metadata.slot_mapping, self._history)

    @property
    def _history(self) -> Tensor:
        """The token of each slot, int32 [num_blocks, block_size]."""
        return self.stack.caches[0].key.flatten(1)


class NgramKind(Kind[NgramHead]):
    """See `NgramHead`."""

    protocol = NgramHead
    chains = NgramProgram
    position_offset = 1
    has_probs = False

    def check(self, check: HeadCheck) -> None:
        """Check nothing: the head has no method that computes."""
