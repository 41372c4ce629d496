"""Draft trees: ties, the choice of nodes, the accepted path, and sampling that follows the target's distribution."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from goodness_of_fit import follows
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specgraph import ops
from specgraph.ops import noise
from specgraph.ops.tree import top_tokens

VOCAB, STEPS, N = 4, 2, 20_000


def grown(steps_logits: list[Tensor], top_k: int, nodes: int, offsets: Tensor | None = None) -> tuple[list, list]:
    """Tokens and parents of one request's tree; `steps_logits` holds [1, V], then [k, V] of each later step."""
    steps, k = len(steps_logits), top_k
    size = k + (steps - 1) * k * k
    node = {"node_scores": torch.full((1, size), 7.0), "node_token_ids": torch.full((1, size), 7)}
    node["node_parents"] = torch.full((1, size), 7)
    beam = {"beam_scores": torch.full((1, k), 7.0), "beam_nodes": torch.full((1, k), 7)}
    beam |= {name: torch.full((k,), 7) for name in ("beam_rows", "token_ids", "ancestors")}
    for step, logits in enumerate(steps_logits):
        ops.grow_tree(logits, offsets, torch.tensor([step]), first=step == 0, **node, **beam)
    tokens, parents = torch.full((1, nodes), -7), torch.full((1, nodes), -7)
    ops.choose_nodes(*node.values(), tokens, parents)
    return tokens[0].tolist(), parents[0].tolist()


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**30), st.booleans(), st.data())
def test_a_block_s_tree_holds_the_best_of_all_paths(requests, steps, top_k, seed, ties, data):
    """Against a list of every path: by score, then the shorter one, then the one whose first tokens rank higher."""
    vocab, all_paths = 5, sum(top_k**length for length in range(1, steps + 1))
    nodes = data.draw(st.integers(1, min(all_paths, 40)))
    logits = torch.randn(requests, steps, vocab, generator=torch.Generator().manual_seed(seed))
    if ties:
        logits[:, :, [3, 1, 4]] = 2.0
    tokens, parents = torch.full((requests, nodes), -7), torch.full((requests, nodes), -7)
    ops.draft_block_tree(logits.flatten(0, 1), None, top_k, tokens, parents)
    scores = logits.double().log_softmax(-1)
    for r in range(requests):
        best = [sorted(range(vocab), key=lambda t: (-row[t], t))[:top_k] for row in logits[r].tolist()]
        every = [path for length in range(1, steps + 1) for path in product(range(top_k), repeat=length)]
        value = {p: sum(float(scores[r, i, best[i][rank]]) for i, rank in enumerate(p)) for p in every}
        ranked = sorted(every, key=lambda p: (-round(value[p], 5), len(p), p))
        seen: list[tuple[int, ...]] = [()]
        for token, parent in zip(tokens[r].tolist(), parents[r].tolist(), strict=True):
            path = seen[parent]
            seen.append((*path, best[len(path)].index(token)))
        wrong = set(seen[1:]) ^ set(ranked[:nodes])
        assert len(set(seen)) == nodes + 1
        assert all(abs(value[p] - value[ranked[nodes - 1]]) < 1e-4 for p in wrong)  # rounding decided
        assert not wrong or len({round(value[p], 5) for p in wrong}) > 1, "the rule for equal scores decides"


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


def test_ids_are_mapped_to_the_target():
    sure = torch.tensor([[0.0, 9.0, 1.0]])
    tokens, _ = grown([sure, sure.repeat(2, 1)], top_k=2, nodes=6, offsets=torch.tensor([5, 6, 7]))
    assert tokens == [7, 9, 7, 9, 7, 9]


trees = st.integers(2, 20).flatmap(
    lambda nodes: st.tuples(*(st.tuples(st.integers(0, i), st.integers(0, VOCAB - 1)) for i in range(nodes)))
)
"""(parent, token) of each node."""


def depths(parents: list[int]) -> list[int]:
    depth = [0]
    for parent in parents:
        depth.append(depth[parent] + 1)
    return depth


def distinct(parents: list[int], tokens: list[int]) -> list[int]:
    """The tokens, with -1 where an earlier sibling has the same."""
    seen: set[tuple[int, int]] = set()
    return [-1 if (p, t) in seen else (seen.add((p, t)) or t) for p, t in zip(parents, tokens, strict=True)]


def verify(logits: Tensor, tokens, parents, steps: int, starts, temperature=None, seeds=None, block=4):
    """`begin_tree_verify` over tables of consecutive blocks, then `verify_tree`; all that they write, by name."""
    n, nodes = tokens.shape
    rows = nodes + 1
    table = (torch.arange(n * 20).view(n, 20) + 1).int()
    begun = {name: torch.full((n * rows,), -7) for name in ("token_ids", "positions", "slot_mapping", "ancestors")}
    begun["seq_lens"] = torch.full((n,), -7, dtype=torch.int32)
    ops.begin_tree_verify(
        torch.zeros(n, dtype=torch.int64), tokens, parents, starts, table, num_steps=steps, max_model_len=60,
        block_size=block, **begun,
    )  # fmt: skip
    out = {"sampled_token_ids": torch.full((n, steps + 1), -7), "num_sampled": torch.full((n,), -7, dtype=torch.int32)}
    out |= {"path_rows": torch.full((n * (steps + 1),), -7)}
    out |= {name: torch.full((n * steps,), -7) for name in ("from_slots", "to_slots")}
    ops.verify_tree(
        logits, tokens, parents, temperature, seeds, starts, begun["positions"], begun["slot_mapping"], **out
    )
    return begun | out


@given(st.lists(trees, min_size=1, max_size=3), st.integers(0, 2**30), st.integers(0, 40))
def test_the_accepted_path_is_that_of_a_loop(drawn, seed, start):
    nodes = max(map(len, drawn))
    drawn = [(*tree, *[(0, tree[0][1])] * (nodes - len(tree))) for tree in drawn]  # more of a token: no draft token
    parents = [[parent for parent, _ in tree] for tree in drawn]
    tokens = [distinct(p, [token for _, token in tree]) for p, tree in zip(parents, drawn, strict=True)]
    steps = max(max(depths(row)) for row in parents)
    logits = torch.randn(len(drawn) * (nodes + 1), VOCAB, generator=torch.Generator().manual_seed(seed))
    starts = torch.tensor([start, -1, start + 3][: len(drawn)])
    seen = verify(logits, torch.tensor(tokens), torch.tensor(parents), steps, starts)
    best = logits.argmax(-1).view(len(drawn), -1).tolist()
    for r, (row_parents, row_tokens) in enumerate(zip(parents, tokens, strict=True)):
        depth, own = depths(row_parents), slice(r * (nodes + 1), (r + 1) * (nodes + 1))
        path = [0]
        while children := [
            i + 1
            for i, (parent, token) in enumerate(zip(row_parents, row_tokens, strict=True))
            if parent == path[-1] and token == best[r][path[-1]]
        ]:
            path += children
        if starts[r] < 0:
            assert seen["num_sampled"][r] == 0
            assert (seen["slot_mapping"][own] == -1).all()
            assert (seen["sampled_token_ids"][r] == -1).all()
            continue
        wanted = [best[r][row] for row in path]
        assert seen["num_sampled"][r] == len(path)
        assert seen["sampled_token_ids"][r].tolist() == wanted + [-1] * (steps + 1 - len(wanted))
        places = path + [path[-1]] * (steps + 1 - len(path))
        assert seen["path_rows"].view(len(drawn), -1)[r].tolist() == [r * (nodes + 1) + row for row in places]
        assert seen["positions"][own].tolist() == [min(int(starts[r]) + d, 59) for d in depth]
        first = 4 * (20 * r + 1) + int(starts[r])
        assert seen["slot_mapping"][own].tolist() == list(range(first, first + nodes + 1))
        moves = zip(seen["from_slots"].view(len(drawn), -1)[r], seen["to_slots"].view(len(drawn), -1)[r], strict=True)
        wanted = [(first + row, first + i) for i, row in enumerate(path)][1:]
        assert [(int(a), int(b)) for a, b in moves] == wanted + [(0, 0)] * (steps - len(wanted))
        for row in range(nodes + 1):
            line, at = {row}, row
            while at:
                at = row_parents[at - 1]
                line.add(at)
            bits = int(seen["ancestors"][own][row])
            assert {i for i in range(64) if bits >> i & 1} == line


def test_keys_and_values_are_all_read_before_any_is_written():
    key, value = torch.arange(12.0).view(3, 4, 1, 1), -torch.arange(12.0).view(3, 4, 1, 1)
    ops.move_kv(key, value, torch.tensor([6, 7, 0, 0]), torch.tensor([5, 6, 0, 0]))
    assert key.flatten().tolist() == [0, 1, 2, 3, 4, 6, 7, 7, 8, 9, 10, 11]
    assert value.flatten().tolist() == (-key).flatten().tolist()
    strided = torch.zeros(3, 4, 2, 1)[:, :, :1]
    assert not strided.is_contiguous()
    strided[1, 2] = 5.0
    ops.move_kv(strided, strided, torch.tensor([6]), torch.tensor([4]))
    assert strided[1, 0].item() == 5.0


TARGET = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1)) * 1.5
"""Logits of the next token by the last one."""
TREE = [(0, 2), (0, 0), (1, 1), (1, 3), (2, 0), (2, 2)]
"""(parent, token): two siblings after the last token, two after each of them."""


def sampled_counts(temperature: float) -> tuple[Tensor, Tensor]:
    """How often each continuation of 3 tokens came out over N seeds, and the number of accepted tokens of each."""
    parents, tokens = (torch.tensor([node[i] for node in TREE]).expand(N, -1) for i in (0, 1))
    last = torch.zeros(N, 1, dtype=torch.int64)
    logits = TARGET[torch.cat([last, tokens], 1)].flatten(0, 1)
    warm, seeds = torch.full((N,), temperature), torch.arange(N)
    seen = verify(logits, tokens, parents, STEPS, torch.full((N,), 6), warm, seeds)
    drawn, counts = seen["sampled_token_ids"].clone(), seen["num_sampled"]
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
        monkeypatch.setattr(ops, "verify_tree", heated(ops.verify_tree))
    if bias == "siblings preferred":
        prefer = torch.tensor([0.25, 0.0, 0.25, 0.0])
        monkeypatch.setattr(noise, "gumbel", lambda *args: gumbel(*args) + prefer)
    counts, _ = sampled_counts(0.6)
    assert not follows(counts, joint(0.6))


def heated(real):
    def broken(logits, tokens, parents, temperature, *rest, **out):
        real(logits, tokens, parents, torch.ones_like(temperature), *rest, **out)

    return broken
