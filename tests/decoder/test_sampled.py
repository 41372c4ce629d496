"""Sampled speculative decoding repeats for a seed, in every batch and lowering."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from specgraph_run.cli.prompts import Prompt
from specgraph_run.decoder import Request, SpeculativeDecoder
from specgraph_run.decoder.layout import ParallelLayout


def tokens(results) -> list[list[int]]:
    return [result.token_ids for result in results]


def warm(requests: list[Request], temperature: float = 0.9) -> list[Request]:
    return [replace(request, temperature=temperature, seed=7 * i) for i, request in enumerate(requests)]


def test_a_seed_repeats_whatever_the_batch_without_a_drafter(make_decoder, requests):
    """The suite has drafters."""
    decoder = make_decoder(None, sampled=True, query_len=4)
    together = tokens(decoder.generate(warm(requests)))
    assert tokens(decoder.generate(warm(requests))) == together
    assert tokens(decoder.generate(list(reversed(warm(requests))))) == list(reversed(together))
    assert [tokens(decoder.generate([one]))[0] for one in warm(requests)] == together
    others = [replace(one, seed=one.seed + 1) for one in warm(requests)]
    assert sum(a != b for a, b in zip(tokens(decoder.generate(others)), together, strict=True)) >= len(requests) - 1


@pytest.mark.parametrize(
    ("lowering", "attention", "draft_sampling"),
    [("step", "host", "sampled"), ("merged", "device", "greedy")],
)
def test_every_lowering_samples_the_same_tokens(
    make_decoder, requests, shadow, target_alone, lowering, attention, draft_sampling
):  # fmt: skip
    """Greedy drafts keep no distribution, and a request at temperature 0 gets what a greedy decoder gives it."""
    config = {"sampled": True, "draft_sampling": draft_sampling}
    eager = make_decoder(shadow, **config)
    wanted = tokens(eager.generate(warm(requests, 0.5)))
    decoder = make_decoder(shadow, decode=lowering, attention=attention, **config)
    assert tokens(decoder.generate(warm(requests, 0.5))) == wanted
    # Host lengths wait for each round's tokens, so that no round runs beside a request that has ended.
    rounds = (decoder if attention == "host" else eager).metrics.rounds
    assert decoder.metrics == replace(eager.metrics, rounds=rounds)
    assert decoder.metrics.accepted[1] > 0
    assert (decoder.drafter.buffers.draft_probs is None) is (draft_sampling == "greedy")
    assert tokens(decoder.generate(requests)) == target_alone(requests)


def test_requests_without_a_seed_differ_and_repeat_with_the_program(make_decoder, requests, shadow):
    """Requests dealt out to data parallel ranks in turns give the tokens of one process."""
    asked = [replace(requests[0], temperature=0.9)] * 2
    given = [replace(each, seed=0) for each in asked]

    made = make_decoder(shadow, sampled=True)

    def new(layout=None):
        return SpeculativeDecoder(made.target.model, shadow, made.platform, made.config, layout=layout)

    results = made.generate(asked)
    told = [made.generate([replace(asked[0], seed=each.seed)]) for each in results]
    assert [repeated for [repeated] in told] == results, "their seeds repeat them"
    first, (seeded, again), second = tokens(results), *(tokens(made.generate(each)) for each in (given, asked))
    assert seeded == again
    assert len(set(map(tuple, [*first, seeded, *second]))) == 5
    assert tokens(new().generate([*asked, *given, *asked])) == [*first, seeded, again, *second]
    assert made.generate(requests[:1])[0].seed is None, "it is greedy"
    assert made.cancel(made.add(replace(asked[0], seed=5)))
    assert [chunk.seed for chunk in made.step()] == [5]
    ranks = [new(ParallelLayout(None, None, rank, 2)) for rank in range(2)]
    assert [tokens(each.generate(asked[:1]))[0] for each in ranks] == first


def test_a_seed_repeats_for_the_same_k_and_says_so(make_decoder, requests, shadow):
    """With K by batch size, the place in a draft decides whether a token is accepted or drawn."""
    [first, second] = warm(requests[:2], 1.0)
    by_batch = make_decoder(shadow, sampled=True, draft_schedule={1: 3, 2: 1}, max_num_requests=2)
    assert tokens(by_batch.generate([first, second]))[0] != tokens(by_batch.generate([first]))[0]
    assert by_batch.generate([first, second]) == by_batch.generate([first, second])
    [seed] = [field for field in fields(Prompt) if field.name == "seed"]
    assert "same seed and K" in seed.metadata["help"]
