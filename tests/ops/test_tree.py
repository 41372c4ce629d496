"""Draft trees: equal and certain scores, and sampling that follows the target's distribution. The op table has the rest
(`op_rows/trees.py`)."""

from __future__ import annotations

import pytest
import torch
from goodness_of_fit import follows
from specgraph_run.decoder import ops as decoder_ops
from torch import Tensor

from specgraph import ops
from specgraph.ops import noise
from specgraph.ops.tree import top_tokens

VOCAB, STEPS, N = 4, 2, 20_000


def grown(steps_logits: list[Tensor], top_k: int, nodes: int) -> tuple[list, list]:
    """Tokens and parents of one request's tree; `steps_logits` holds [1, V], then [k, V] of each later step."""
    steps, k = len(steps_logits), top_k
    size = k + (steps - 1) * k * k
    candidates = ops.Candidates(torch.full((1, size), 7.0), torch.full((1, size), 7), torch.full((1, size), 7))
    beams = ops.Beams(torch.full((1, k), 7.0), torch.full((1, k), 7), *(torch.full((k,), 7) for _ in range(3)))
    for step, logits in enumerate(steps_logits):
        ops.grow_tree(logits, None, torch.tensor([step]), step == 0, candidates, beams)
    tree = ops.TreeNodes(torch.full((1, nodes), -7), torch.full((1, nodes), -7))
    ops.choose_nodes(candidates, tree)
    return tree.token_ids[0].tolist(), tree.parents[0].tolist()


def test_among_equal_tokens_the_lower_id_comes_first():
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0, 1.0, 1.0, -9.0]])
    log_probs, ids = top_tokens(logits, 5)
    assert ids.tolist() == [[1, 3, 2, 4, 5]]
    torch.testing.assert_close(log_probs, logits.log_softmax(-1).gather(1, ids))


@pytest.mark.parametrize("vocab", [2, 31, 1000])
def test_where_all_scores_are_equal_the_tree_is_the_lowest_ids_of_the_first_nodes(vocab):
    flat = [torch.zeros(1, vocab), torch.zeros(2, vocab), torch.zeros(2, vocab)]
    tokens, parents = grown(flat, top_k=2, nodes=5)
    assert tokens == [0, 1, 0, 1, 0]  # both of step 0, both after the first of them, the first after the second
    assert parents == [0, 0, 1, 1, 2]


def test_a_certain_child_scores_as_its_parent_and_comes_after_it():
    """log-probability 0: the scores of a whole path are equal, and the tree must still hold its beginning."""
    sure = torch.tensor([[0.0, 200.0, 0.0, 0.0]])
    tokens, parents = grown([sure, sure.repeat(2, 1), sure.repeat(2, 1)], top_k=2, nodes=3)
    assert (tokens, parents) == ([1, 1, 1], [0, 1, 2])


TARGET = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1)) * 1.5
"""Logits of the next token by the last one."""
TREE = [(0, 2), (0, 0), (1, 1), (1, 3), (2, 0), (2, 2)]
"""(parent, token): two siblings after the last token, two after each of them."""


def sampled_counts(temperature: float) -> tuple[Tensor, Tensor]:
    """Return how often each continuation of 3 tokens came out over N seeds, and the number of accepted tokens of
    each."""
    parents, tokens = (torch.tensor([node[i] for node in TREE]).expand(N, -1) for i in (0, 1))
    last = torch.zeros(N, 1, dtype=torch.int64)
    logits = TARGET[torch.cat([last, tokens], 1)].flatten(0, 1)
    warm, seeds = torch.full((N,), temperature), torch.arange(N)
    depth = torch.tensor([0, *(1 if parent == 0 else 2 for parent, _ in TREE)])
    positions, slots = (6 + depth).repeat(N), torch.arange(N * len(depth))
    sampled = decoder_ops.Sampled(torch.full((N, STEPS + 1), -7), torch.full((N,), -7, dtype=torch.int32))
    path = decoder_ops.AcceptedPath(
        torch.zeros(N * (STEPS + 1)).long(), *(torch.zeros(N * STEPS).long() for _ in range(2))
    )
    starts, acceptance = torch.full((N,), 6), decoder_ops.Acceptance(warm, seeds)
    decoder_ops.verify_tree(logits, ops.TreeNodes(tokens, parents), starts, positions, slots, acceptance, sampled, path)
    drawn, counts = sampled
    p, g = torch.softmax(TARGET / temperature, dim=1), torch.Generator().manual_seed(9)
    for column in range(1, STEPS + 1):  # what verification left open is drawn from the target itself
        following = torch.multinomial(p[drawn[:, column - 1]], 1, generator=g)[:, 0]
        drawn[:, column] = torch.where(column < counts, drawn[:, column], following)
    index = sum(drawn[:, i] * VOCAB ** (STEPS - i) for i in range(STEPS + 1))
    return torch.bincount(index, minlength=VOCAB ** (STEPS + 1)), counts - 1


def joint(temperature: float) -> Tensor:
    p = torch.softmax(TARGET.double() / temperature, dim=1)
    return (p[0][:, None, None] * p[:, :, None] * p[None]).flatten()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampled_output_follows_the_target(temperature):
    counts, accepted = sampled_counts(temperature)
    assert follows(counts, joint(temperature))
    assert not follows(counts, joint(temperature * 1.1))
    assert follows(torch.bincount(accepted, minlength=3), multi_round_acceptance(temperature))


def multi_round_acceptance(temperature: float) -> Tensor:
    """Probability of 0, 1, 2 accepted tokens in multi-round speculative sampling over siblings without replacement.

    Each sibling in turn is accepted with the probability that is left of its token; a rejected token is taken out of
    the target's distribution, which is normalised again.
    """
    p = torch.softmax(TARGET.double() / temperature, dim=1)
    chance = {}
    for row, token in enumerate([0, *(token for _, token in TREE)]):
        left, rejected = p[token].clone(), 1.0
        for child, (parent, sibling) in enumerate(TREE, start=1):
            if parent == row:
                accept = float(left[sibling] / left.sum())
                chance[child] = rejected * accept
                rejected, left[sibling] = rejected * (1 - accept), 0.0
    one = sum(chance[i] for i in (1, 2))
    both = sum(chance[TREE[i - 1][0]] * chance[i] for i in (3, 4, 5, 6))
    return torch.tensor([1 - one, one - both, both], dtype=torch.float64)


@pytest.mark.parametrize("bias", ["one noise for all positions", "temperature left out", "siblings preferred"])
def test_a_biased_sampler_goes_red(bias, monkeypatch):
    gumbel = noise.gumbel
    if bias == "one noise for all positions":
        monkeypatch.setattr(noise, "gumbel", lambda seeds, at, *rest: gumbel(seeds, torch.zeros_like(at), *rest))
    if bias == "temperature left out":
        monkeypatch.setattr(decoder_ops, "verify_tree", heated(decoder_ops.verify_tree))
    if bias == "siblings preferred":
        prefer = torch.tensor([0.25, 0.0, 0.25, 0.0])
        monkeypatch.setattr(noise, "gumbel", lambda *args: gumbel(*args) + prefer)
    counts, _ = sampled_counts(0.6)
    assert not follows(counts, joint(0.6))


def heated(real):
    def broken(*args):
        *given, acceptance, sampled, path = args
        real(*given, acceptance._replace(temperature=torch.ones_like(acceptance.temperature)), sampled, path)

    return broken
