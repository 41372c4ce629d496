"""Attention with position-dependent state of its own: the core moves the metadata on, the hook moves that state."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from draft.pairs import VOCAB, make_head, make_target
from draft.rounds import LOWERINGS, RandomBatches, caches_equal, make_drafter
from torch import Tensor

from specgraph.attention import PagedAttention

SETTINGS = {
    "num_speculative_tokens": 4,
    "max_num_requests": 3,
    "max_model_len": 48,
    "capture_sizes": [1, 3],
    "prefill": "eager",
}


@dataclass(frozen=True)
class OwnLengths(PagedAttention):
    """Paged attention whose later steps read lengths from a tensor of its own, as a precomputed schedule would be."""

    lengths: Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.int32))

    def forward(self, layer, index, query, key, value, cache, context):
        if context.step:
            own = self.lengths[: context.metadata.num_requests]
            context = replace(context, metadata=replace(context.metadata, seq_lens=own))
        return super().forward(layer, index, query, key, value, cache, context)

    def named_tensors(self):
        return {"own_lengths": self.lengths}


class Advancing(OwnLengths):
    """The same, with the hook."""

    def after_advance(self, metadata, draft_step):
        self.lengths[: metadata.num_requests].copy_(metadata.seq_lens)


def drafts(attention, lowering):
    head = make_head("eagle", make_target())
    drafter = make_drafter(head, lowering, attention, **SETTINGS)
    rounds = RandomBatches(drafter.config, head.aux_size, VOCAB, head.dtype, seed=4)
    with torch.inference_mode():
        tokens = [drafter.propose(rounds.next(n)).token_ids for n in (3, 1, 2, 3)]
    caches = drafter.caches
    drafter.close()
    return tokens, caches


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_the_hook_keeps_the_backends_state_up_to_date(lowering):
    wanted, caches = drafts(PagedAttention(), "eager")
    tokens, own = drafts(Advancing(), lowering)
    assert all(map(torch.equal, tokens, wanted))
    assert caches_equal(own, caches)


def test_without_the_hook_the_state_is_stale():
    """Otherwise the test above would show nothing."""
    _, caches = drafts(PagedAttention(), "eager")
    _, own = drafts(OwnLengths(), "eager")
    assert not caches_equal(own, caches)
