"""Verifies of the likeliest drafts: the tokens of every lowering, the target's distribution, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from draft.pairs import CONFIG, HIDDEN, draw_of
from goodness_of_fit import follows
from specgraph_conformance.tiny_models import layer
from specgraph_models.decoder import AuxWeights
from specgraph_models.dflash import BlockParts
from specgraph_models.dspark import ConfidenceHead, DSparkHead, MarkovHead
from specgraph_models.llama import LlamaTarget
from specgraph_run.decoder import Request

from specgraph.errors import ConfigError, UnsupportedError
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


def bigrams(chances: list[list[float]], drafted: list[list[float]], confidence: list[float]):
    """A target and a drafter that draw a token by the one before it, with `chances` and `drafted` [before][token]. That
    token also says how sure the drafter is of its draft."""

    def head(of: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(of.t() / HIDDEN**0.5, (0, HIDDEN - vocab))  # a normed state is this root, once

    vocab, one, layers = len(chances), torch.ones(HIDDEN), [layer(draw_of(1, torch.float32)(0), HIDDEN, gain=0.0)]
    sizes = replace(CONFIG, vocab_size=vocab, num_layers=1, max_position_embeddings=1024)
    nothing = head(torch.zeros(vocab, vocab))
    weights = AuxWeights(torch.eye(vocab, HIDDEN), Weight(torch.zeros(HIDDEN, HIDDEN)), one, one, nothing)
    block = BlockParts(sizes, weights, layers, (1,), 3, vocab - 1, True)
    sure = torch.cat((torch.zeros(HIDDEN), torch.tensor(confidence).logit()))[None]
    markov = MarkovHead(torch.eye(vocab), Weight(torch.tensor(drafted).log().t().contiguous()))
    target = LlamaTarget(sizes, weights.embed_tokens, layers, one, head(torch.tensor(chances).log()))
    return target, DSparkHead(block, markov, ConfidenceHead(sure, None))


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
    with pytest.raises(ConfigError, match=r"verified_drafts 'auto' is gone, .* number or None: .* such as 2\.5"):
        make_decoder(dspark(target), verified_drafts="auto")
