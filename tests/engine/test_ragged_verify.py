"""Verifies of the likeliest drafts: the tokens of every lowering, the target's distribution, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise, product
from operator import mul
from random import Random

import pytest
import torch
from draft.pairs import CONFIG, HIDDEN, Draw
from goodness_of_fit import follows
from hypothesis import given, settings
from hypothesis import strategies as st

from specgraph import ops
from specgraph.engine import Request
from specgraph.engine.adaptive_k import AcceptanceByConfidence, AdaptiveK
from specgraph.errors import ConfigError, UnsupportedError
from specgraph.models.decoder import AuxWeights
from specgraph.models.dflash import BlockParts
from specgraph.models.dspark import ConfidenceHead, DSparkHead, MarkovHead
from specgraph.models.llama import LlamaTarget
from specgraph.ops.linear import Weight


def dspark(target: LlamaTarget, confident: bool = True) -> DSparkHead:
    """A random head with the target's own last layer as its block, whose confidence differs much from row to row."""
    g, sizes, rank = torch.Generator().manual_seed(3), target.sizes, 4
    vocab, hidden = target.embed_tokens.shape

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=g) * scale

    one = torch.ones(hidden)
    weights = AuxWeights(
        embed_tokens=target.embed_tokens,
        fc=Weight(random(hidden, 2 * hidden, scale=hidden**-0.5)),
        hidden_norm=one,
        norm=one,
        lm_head=target.lm_head,
    )
    block = BlockParts(replace(sizes, num_layers=1), weights, target.layers[-1:], (1, 2), 3, vocab - 1, True)
    markov = MarkovHead(random(vocab, rank), Weight(random(vocab, rank, scale=0.3)))
    confidence = ConfidenceHead(random(1, hidden + rank, scale=0.5), None) if confident else None
    return DSparkHead(block, markov, confidence)


def tokens(results) -> list[list[int]]:
    return [result.token_ids for result in results]


def test_every_lowering_gives_the_same_tokens(make_decoder, target, target_alone, requests):
    """Greedy requests have the target's own tokens, sampled ones, whose drafts are often accepted, those of eager."""
    asked = [replace(each, temperature=4.0 * (i % 2), seed=i) for i, each in enumerate(requests)]
    options = {"sampled": True, "verified_drafts": 1.25}
    eager = make_decoder(dspark(target), **options)
    wanted = tokens(eager.generate(asked))
    alone = target_alone(requests)
    assert wanted[::2] == alone[::2]
    for lowering in ("step", "merged"):
        decoder = make_decoder(dspark(target), decode=lowering, **options)
        assert tokens(decoder.generate(asked)) == wanted
        assert decoder.metrics == eager.metrics
    assert sum(eager.metrics.accepted) > 0


AUTO = {"verified_drafts": "auto", "k_candidates": (1, 2, 3), "num_speculative_tokens": 3}


def test_the_number_of_verified_drafts_may_change_every_round(make_decoder, target, target_alone, requests):
    """Greedy requests have the target's own tokens; all proposes draft 3 tokens, whichever number is verified. What the
    policy is told is of the round that is read, while one more runs."""
    asked = [replace(each, temperature=4.0 * (i % 2), seed=i) for i, each in enumerate(requests)]
    alone = target_alone(requests)
    order, wanted = [3, 1, 2, 1, 3, 2] * 9, None
    for lowering in ("eager", "step", "merged"):
        options = AUTO | {"sampled": True, "round_times": {4: dict.fromkeys((1, 2, 3), 1.0)}, "rounds_ahead": 1}
        decoder = make_decoder(dspark(target), decode=lowering, **options)
        policy, seen = AdaptiveK({4: {}}, AcceptanceByConfidence((1, 2, 3))), []
        turns, policy.acceptance.observe = iter(order), lambda *told, seen=seen: seen.append(told)
        policy.choose = lambda num_rows, turns=turns: next(turns)
        decoder.rounds.adaptive = policy
        got = tokens(decoder.generate(asked))
        assert got[::2] == alone[::2]
        assert (got, seen) == (wanted or (got, seen))
        wanted = got, seen
        assert [candidate for candidate, *_ in seen] == order[: len(seen)]
        assert sum(map(sum, (accepted for _, accepted, _ in seen))) > 0
        assert set(decoder.metrics.drafts_by_k) == {3}
        for candidate, accepted, expected in seen:
            assert sum(accepted) <= candidate * 4
            assert 0 < expected[0] <= expected[1] <= expected[2] < 3


def bigrams(chances: list[list[float]], drafted: list[list[float]], confidence: list[float]):
    """A target and a drafter that draw a token by the one before it, with `chances` and `drafted` [before][token]. That
    token also says how sure the drafter is of its draft."""

    def head(of: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(of.t() / HIDDEN**0.5, (0, HIDDEN - vocab))  # a normed state is this root, once

    vocab, one, layers = len(chances), torch.ones(HIDDEN), [Draw(1, torch.float32, gain=0.0).layer()]
    sizes = replace(CONFIG, vocab_size=vocab, num_layers=1, max_position_embeddings=1024)
    nothing = head(torch.zeros(vocab, vocab))
    weights = AuxWeights(torch.eye(vocab, HIDDEN), Weight(torch.zeros(HIDDEN, HIDDEN)), one, one, nothing)
    block = BlockParts(sizes, weights, layers, (1,), 3, vocab - 1, True)
    sure = torch.cat((torch.zeros(HIDDEN), torch.tensor(confidence).logit()))[None]
    markov = MarkovHead(torch.eye(vocab), Weight(torch.tensor(drafted).log().t().contiguous()))
    target = LlamaTarget(sizes, weights.embed_tokens, layers, one, head(torch.tensor(chances).log()))
    return target, DSparkHead(block, markov, ConfidenceHead(sure, None))


def test_the_number_of_verified_drafts_says_nothing_of_the_tokens_to_come(make_decoder):
    """Drafts behind a rejected one are drawn again, and how many are verified then follows their first confidences,
    which say here what was drawn. With the same noise again a number would tell which token comes.
    """
    chances = [0.2, 0.6, 0.2]
    target, drafter = bigrams([chances] * 3, [[0.6, 0.2, 0.2]] * 3, [0.9, 0.1, 0.5])
    options = AUTO | {"sampled": True, "max_num_requests": 1, "max_model_len": 1024}
    options |= {"rounds_ahead": 0, "round_times": {1: dict.fromkeys((1, 2, 3), 1.0)}}
    decoder = make_decoder(drafter, target=target, **options)
    told: list[tuple[int, list[int], list[float]]] = []
    policy = AdaptiveK({1: {}}, AcceptanceByConfidence((1, 2, 3)))
    policy.acceptance.observe = lambda *args: told.append(args)

    def choose(num_rows: int) -> int:
        first, second, third = told[-1][2] if told else (0.5, 0.75, 0.75)
        return 3 if third - second > 0.7 * (second - first) else 1

    policy.choose, decoder.rounds.adaptive = choose, policy
    tokens = {1: [0, 0, 0], 3: [0, 0, 0]}
    asked = Request(prompt_token_ids=[0], max_tokens=300, temperature=1.0, seed=1)
    for chunk in decoder.stream([asked]):
        if len(told) > 1 and told[-2][1] == [0]:
            tokens[told[-1][0]][chunk.token_ids[0]] += 1
    for counts in tokens.values():
        assert sum(counts) > 25
        assert follows(counts, chances)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.booleans(), *[st.floats(0, 1, width=32)] * 3), min_size=1, max_size=5), st.data())
def test_expected_drafts_are_those_of_the_likeliest(rows, data):
    """Against the best of all ways to verify so many drafts, each request's from its first on."""
    confidence, live = torch.tensor([row[1:] for row in rows]), torch.tensor([row[0] for row in rows])
    total = data.draw(st.integers(1, 3 * len(rows)))
    chances = [[row[1], row[1] * row[2], row[1] * row[2] * row[3]] if row[0] else [0.0] * 3 for row in rows]
    ways = (way for way in product(range(4), repeat=len(rows)) if sum(way) == total)
    best = max(sum(sum(each[:n]) for each, n in zip(chances, way, strict=True)) for way in ways)
    got = ops.expected_accepted(confidence, live, [total, total])
    sums = got.double() * live.sum().clamp(min=1) * 2**20
    if live.sum() in (1, 2, 4):
        assert torch.equal(sums, sums.round()), "ranks whose devices add in another order would choose another number"
    assert got.tolist() == pytest.approx([best / max(1, sum(row[0] for row in rows))] * 2, abs=1e-5)


def test_a_drafter_that_is_sure_of_nothing_has_the_fewest_verified():
    policy = AdaptiveK({4: {1: 1.0, 2: 1.1}}, AcceptanceByConfidence((1, 2)))
    policy.acceptance.observe(2, [0] * 300_000, [0.0, 0.0])
    assert policy.choose(4) == 1


@pytest.mark.parametrize(("power", "cost"), list(product((0.7, 2.0), (0.02, 0.1, 0.3))))
def test_within_3_percent_of_the_best_fixed_number(power, cost):
    """Drafts are accepted by a power of what the drafter is sure of: it may be too sure, or not sure enough. A round
    takes 1 and `cost` for each draft that is verified per request; 4 requests, K 5."""
    candidates, times = (1, 2, 3, 5), {4: {k: 1 + cost * k for k in (1, 2, 3, 5)}}

    def speed(policy: AdaptiveK, rounds: int) -> float:
        random, tokens, time = Random(5), 0, 0.0
        for _ in range(rounds):
            sure = [[random.choice((0.2, 0.6, 0.95)) ** (1 + i / 3) for i in range(5)] for _ in range(4)]
            chances = [[*accumulate(each, mul)] for each in sure]
            places = sorted(((chance, r) for r, each in enumerate(chances) for chance in each), reverse=True)
            k = policy.choose(4)
            verified = [sum(r == own for _, r in places[: 4 * k]) for own in range(4)]
            lucks = [[random.random() for _ in range(5)] for _ in range(4)]
            accepted = [
                next((i for i in range(n) if luck[i] >= each[i] ** power), n)
                for n, luck, each in zip(verified, lucks, sure, strict=True)
            ]
            policy.acceptance.observe(
                k, accepted, [sum(chance for chance, _ in places[: 4 * n]) / 4 for n in candidates]
            )
            tokens, time = tokens + 4 + sum(accepted), time + times[4][k]
        return tokens / time

    fixed = [speed(AdaptiveK({4: {k: 1 + cost * k}}, AcceptanceByConfidence(candidates)), 600) for k in candidates]
    assert speed(AdaptiveK(times, AcceptanceByConfidence(candidates)), 600) >= 0.97 * max(fixed)


def test_a_pass_has_as_many_rows_as_are_asked_for(make_decoder, target):
    for verified, rows in ((0.1, 5), (1.0, 8), (2.5, 14), (9.0, 16)):
        decoder = make_decoder(dspark(target), verified_drafts=verified)
        program = decoder.target.verify_program
        b = program.sliced(4, 4, program.verified(4, 4))
        assert b.token_ids.shape[0] == b.metadata.positions.shape[0] == rows
    options = {"sampled": True, "verified_drafts": 1.0, "draft_schedule": {2: 2, 4: 3}, "synthetic_acceptance": 0.5}
    b = make_decoder(dspark(target), **options).target.verify_program.sliced(2, 3)
    assert all(tensor.is_contiguous() for tensor in b.named_tensors("verify").values()), "kernels take whole rows"
    assert b.synthetic_acceptance.shape == (2,)


def test_parameters_of_sampling_and_logprobs(make_decoder, target, requests):
    """A penalty counts the tokens of the row's own text, whichever rows it has."""
    asked = [replace(each, frequency_penalty=1.5, seed=i) for i, each in enumerate(requests)]
    options = {"sampling_parameters": True, "logprobs": True}
    wanted = make_decoder(dspark(target), **options).generate(asked)
    got = make_decoder(dspark(target), verified_drafts=1.0, **options).generate(asked)
    assert tokens(got) == tokens(wanted)
    for one, other in zip(got, wanted, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_sampled_output_has_the_targets_distribution(make_decoder):
    """Drafts are left out by what is known of those before them."""
    chances = [[0.2, 0.6, 0.2], [0.5, 0.2, 0.3], [0.1, 0.3, 0.6]]
    target, drafter = bigrams(chances, [[0.6, 0.2, 0.2], [0.3, 0.5, 0.2], [0.2, 0.4, 0.4]], [0.9, 0.1, 0.5])
    decoder = make_decoder(drafter, target=target, max_num_requests=30, sampled=True, verified_drafts=1.0)
    asked = [Request(prompt_token_ids=[0], max_tokens=60, temperature=1.0, seed=i) for i in range(30)]
    counts = [[0, 0, 0] for _ in chances]
    for text in tokens(decoder.generate(asked)):
        for before, token in pairwise((0, *text)):
            counts[before][token] += 1
    assert sum(decoder.metrics.accepted) > 500
    for got, wanted in zip(counts, chances, strict=True):
        assert follows(got, wanted)


def test_what_cannot_be_ragged_is_refused(make_decoder, target, eagle3):
    with pytest.raises(ConfigError, match="the drafter Eagle3Head says none"):
        make_decoder(eagle3, verified_drafts=1.0)
    with pytest.raises(ConfigError, match="the drafter DSparkHead says none"):
        make_decoder(dspark(target, confident=False), verified_drafts=1.0)
    with pytest.raises(ConfigError, match="no drafter"):
        make_decoder(None, verified_drafts=1.0)
    with pytest.raises(UnsupportedError, match="takes lengths from the host"):
        make_decoder(dspark(target), attention="host", verified_drafts=1.0)
    with pytest.raises(ConfigError, match="verified_drafts"):
        make_decoder(dspark(target), verified_drafts=0)
    with pytest.raises(ConfigError, match="'auto' chooses among k_candidates, and there are none"):
        make_decoder(dspark(target), verified_drafts="auto")
