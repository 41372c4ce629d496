"""A drafter's pass with only some rows wanted, and its greedy pick, against the plain ones."""

from pathlib import Path

import pytest
import torch
from specgraph_models.checkpoints import load_drafter, load_target

from specgraph import ops

FIXTURES = Path(__file__).parent / "speculators_fixtures"
ROWS = 7


@pytest.fixture(scope="module")
def target():
    return load_target(FIXTURES / "target")


@pytest.fixture(params=["eagle", "eagle3-llama", "eagle3-qwen3", "mtp", "target"])
def head(request, target):
    """Every chain drafter; the target's folder as a draft model."""
    return load_drafter(FIXTURES / request.param, target)


@torch.no_grad()
def test_wanted_rows_are_those_of_the_whole_pass(head, dense_attend):
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(0, 24, (ROWS,), generator=generator)
    hidden = head.combine(torch.randn(ROWS, head.aux_size, generator=generator))
    rows = torch.tensor([5, 1, 1])
    every, some = {}, {}
    whole = head.forward(token_ids, hidden, dense_attend(head.attention_layers, torch.arange(ROWS), every))
    wanted = head.forward(token_ids, hidden, dense_attend(head.attention_layers, torch.arange(ROWS), some), rows)
    assert wanted.carry.shape == (3, head.hidden_size)
    torch.testing.assert_close(wanted.carry, whole.carry[rows], rtol=0, atol=1e-5)
    torch.testing.assert_close(head.logits(wanted.hidden), head.logits(whole.hidden)[rows], rtol=0, atol=1e-5)
    for index, (key, value) in every.items():  # the KV cache gets every row all the same
        assert torch.equal(some[index][0], key)
        assert torch.equal(some[index][1], value)


@pytest.mark.parametrize("head", ["eagle", "eagle3-llama", "eagle3-qwen3", "mtp"], indirect=True)
@torch.no_grad()
def test_greedy_pick_is_the_most_likely_token(head):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(4, head.hidden_size, generator=generator)
    step = torch.tensor([1])
    got_tokens, got_drafts = torch.zeros(4, dtype=torch.int64), torch.full((4, 3), -5)
    assert head.projection is not None
    drafts = ops.Drafts(got_drafts, head.draft_to_target, step, got_tokens)
    ops.draft_from_hidden(hidden, head.projection.lm_head, drafts)
    ids = head.logits(hidden).argmax(dim=-1)
    if head.draft_to_target is not None:
        ids = ids + head.draft_to_target[ids]
    assert torch.equal(got_tokens, ids)
    assert torch.equal(got_drafts, torch.stack((torch.full((4,), -5), ids, torch.full((4,), -5)), dim=1))
