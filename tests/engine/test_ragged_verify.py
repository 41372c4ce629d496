"""Verifies of the likeliest drafts: the tokens of every lowering, the target's distribution, and what is refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import torch
from goodness_of_fit import follows

from specgraph.engine import Request
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


def test_every_lowering_gives_the_same_tokens(make_decoder, target, requests):
    """Greedy requests have the target's own tokens, sampled ones, whose drafts are often accepted, those of eager."""
    asked = [replace(each, temperature=4.0 * (i % 2), seed=i) for i, each in enumerate(requests)]
    options = {"capture_sizes": [4], "sampled": True, "verified_drafts": 1.25}
    eager = make_decoder(dspark(target), **options)
    wanted = tokens(eager.generate(asked))
    alone = tokens(make_decoder(None, query_len=4, capture_sizes=[4]).generate(requests))
    assert wanted[::2] == alone[::2]
    for lowering in ("step", "merged", "round"):
        decoder = make_decoder(dspark(target), decode=lowering, **options)
        assert tokens(decoder.generate(asked)) == wanted
        assert decoder.metrics == eager.metrics
    assert sum(eager.metrics.accepted) > 0


def test_a_pass_has_as_many_rows_as_are_asked_for(make_decoder, target):
    for verified, rows in ((0.1, 5), (1.0, 8), (2.5, 14), (9.0, 16)):
        decoder = make_decoder(dspark(target), verified_drafts=verified)
        b = decoder.target.verify_program.sliced(4, 4)
        assert b.token_ids.shape[0] == b.metadata.positions.shape[0] == rows


def test_parameters_of_sampling_and_logprobs(make_decoder, target, requests):
    """A penalty counts the tokens of the row's own text, whichever rows it has."""
    asked = [replace(each, frequency_penalty=1.5, seed=i) for i, each in enumerate(requests)]
    options = {"sampling_parameters": True, "logprobs": True, "capture_sizes": [4]}
    wanted = make_decoder(dspark(target), **options).generate(asked)
    got = make_decoder(dspark(target), verified_drafts=1.0, **options).generate(asked)
    assert tokens(got) == tokens(wanted)
    for one, other in zip(got, wanted, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.slow
def test_sampled_output_has_the_targets_distribution(make_decoder, small_pair, small_pair_folder):
    """All triples of tokens, to their exact chance; drafts are left out by what is known of those before them."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(small_pair_folder / "target", dtype=torch.float32).eval()
    prompt, n = [3, 1, 2], 420
    texts = torch.tensor([[*prompt, *output] for output in product(range(6), repeat=2)])
    logits = model(texts).logits.double().softmax(-1)[:, len(prompt) - 1 :]
    chances = {}
    for row, (first, second) in zip(logits, product(range(6), repeat=2), strict=True):
        for third in range(6):
            chances[first, second, third] = float(row[0, first] * row[1, second] * row[2, third])
    target = small_pair[0]
    decoder = make_decoder(dspark(target), target=target, max_num_requests=60, sampled=True, verified_drafts=1.0)
    asked = [Request(prompt_token_ids=prompt, max_tokens=3, temperature=1.0, seed=i) for i in range(n)]
    counts = Counter(map(tuple, tokens(decoder.generate(asked))))
    assert sum(decoder.metrics.accepted) > n / 10
    assert follows([counts[each] for each in chances], list(chances.values()))


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
