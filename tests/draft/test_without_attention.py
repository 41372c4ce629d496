"""A head that attends to nothing has no KV cache, and drafts from graphs what it says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from draft.rounds import LOWERINGS, RandomBatches, make_drafter
from torch import Tensor

from specgraph import AttentionLayer, ChainKind, DraftOutput, DraftTree
from specgraph.errors import ConfigError

VOCAB, HIDDEN = 40, 16
SIZES = {"num_speculative_tokens": 3, "max_num_requests": 4, "max_model_len": 48}


class RecurrentHead:
    """The next hidden state is a function of the last one and of the token alone."""

    kind = ChainKind()
    attention_layers: Sequence[AttentionLayer] = ()
    aux_layers: Sequence[int] = ()
    draft_to_target = pair_input = projection = ranks = None
    hidden_size = aux_size = HIDDEN
    draft_vocab_size, dtype = VOCAB, torch.float32

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(3)
        self.embed, self.lm_head = torch.randn(VOCAB, HIDDEN, generator=g), torch.randn(VOCAB, HIDDEN, generator=g)

    def combine(self, aux_hidden: Tensor) -> Tensor:
        return aux_hidden

    def forward(self, token_ids: Tensor, hidden: Tensor, attend: object, rows: Tensor | None = None) -> DraftOutput:
        hidden = torch.tanh(self.embed[token_ids] + hidden.flip(-1))
        return DraftOutput(*[hidden if rows is None else hidden[rows]] * 2)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.lm_head.T

    def weights(self) -> dict[str, Tensor]:
        return {"embed": self.embed, "lm_head": self.lm_head}


def drafted(head: RecurrentHead, token: Tensor, hidden: Tensor) -> list[int]:
    """Three tokens after one, in float64."""
    tokens, hidden = [token], hidden.double()
    for _ in range(3):
        hidden = torch.tanh(head.embed[tokens[-1]].double() + hidden.flip(-1))
        tokens.append((hidden @ head.lm_head.double().T).argmax())
    return torch.stack(tokens[1:]).tolist()


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_head_without_attention_drafts_what_it_says(lowering, debug):
    head = RecurrentHead()
    drafter = make_drafter(head, lowering, debug=debug, **SIZES)
    assert not drafter.caches
    assert drafter.prefill([1, 2, 3, 4, 5], range(5), [1, 2], torch.ones(5, HIDDEN)) is not None
    rounds = RandomBatches(drafter.config, HIDDEN, VOCAB, torch.float32, seed=1)
    for _ in range(4):
        batch = rounds.next()
        last = batch.num_sampled.long() - 1
        each = torch.arange(batch.num_requests)
        tokens, states = batch.sampled_token_ids[each, last], batch.aux_hidden.view(len(each), -1, HIDDEN)[each, last]
        want = [drafted(head, *given) for given in zip(tokens, states, strict=True)]
        assert drafter.propose(batch).token_ids.tolist() == want
        if debug:
            with pytest.raises(ConfigError, match="sampled_token_ids"):
                drafter.propose(replace(batch, sampled_token_ids=torch.full_like(batch.sampled_token_ids, VOCAB)))


def test_a_head_without_attention_drafts_trees_whose_likeliest_path_is_its_chain():
    head, tree = RecurrentHead(), DraftTree(num_steps=3, top_k=2, num_draft_tokens=8)
    trees = make_drafter(head, "merged", tree=tree, **SIZES)
    batch = RandomBatches(trees.config, HIDDEN, VOCAB, torch.float32, seed=2).next(2)
    drafts = trees.propose(batch)
    assert drafts.parents is not None
    chains = make_drafter(head, "eager", **SIZES).propose(batch).token_ids
    for tokens, parents, chain in zip(drafts.token_ids.tolist(), drafts.parents.tolist(), chains, strict=True):
        assert (tokens[0], parents[0]) == (int(chain[0]), 0)
