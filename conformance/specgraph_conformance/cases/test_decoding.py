"""Decoding end to end: lossless, the same acceptance in every lowering, requests that come and go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from specgraph.attention import AttentionMetadata
from specgraph.decoding import Request, SpeculativeDecoder
from specgraph.errors import UnsupportedError
from specgraph.platforms import LOWERINGS, Platform
from torch import Tensor

from specgraph_conformance.case import Absent, case
from specgraph_conformance.draft_rig import make_config
from specgraph_conformance.oracles import DenseKeys
from specgraph_conformance.rig import attention_backend
from specgraph_conformance.tiny_models import CONFIG, HEADS, VOCAB, make_head, make_target

CAPTURED = [name for name in LOWERINGS if name != "eager"]
MODEL_SEED = 3


@contextmanager
def decoder(
    platform: Platform, *, lowering: str = "auto", kind: str | None = "eagle", attention: str = "paged", **options: Any
) -> Iterator[SpeculativeDecoder]:
    """A decoder over the tiny pair; `kind` None decodes with the target alone at the verify pass's shape.

    One capture size, so that every pass has one shape and bits don't depend on who else is in the batch.
    """
    keep = {name: options.pop(name) for name in ("num_blocks", "prefill_chunk") if name in options}
    config = make_config(lowering=lowering, **{"k": 4, "max_num_requests": 3, "capture_sizes": (3,)} | options)
    target = make_target(MODEL_SEED, platform.device)
    head = None if kind is None else make_head(kind, MODEL_SEED, platform.device)
    try:
        made = SpeculativeDecoder(
            target,
            head,
            platform,
            config,
            query_len=config.query_len,
            attention=attention_backend(platform, attention),
            **keep,
        )
        made.capture()
    except UnsupportedError as error:
        raise Absent(str(error)) from error
    try:
        yield made
    finally:
        made.close()


def requests(seed: int, count: int = 5, tokens: int = 20, **options: Any) -> list[Request]:
    """Prompts of different lengths, on both sides of a block border, with different limits."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [(3, 16, 17, 30, 9)[i % 5] for i in range(count)]
    prompts = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths]
    return [
        Request(prompt_token_ids=p, max_tokens=tokens - 3 * (i % 3), seed=i, **options) for i, p in enumerate(prompts)
    ]


def generate(made: SpeculativeDecoder, asked: Sequence[Request]) -> list[list[int]]:
    """Token ids of each request."""
    return [result.token_ids for result in made.generate(asked)]


def target_logits(prompt: Sequence[int], following: Sequence[int]) -> Tensor:
    """float64 logits of the tokens after the prompt and after each of `following`, [1 + n, vocab]."""
    target = make_target(MODEL_SEED, torch.device("cpu"), compute=torch.float64)
    shape = 0, CONFIG.num_kv_heads, CONFIG.head_dim
    dense = DenseKeys(target.attention_layers, *([torch.zeros(shape)] * CONFIG.num_layers for _ in range(2)))
    ids = [*prompt, *following]
    dense.at(range(len(ids)))
    out = target.forward(torch.tensor(ids), dense.attend)
    return target.logits(out.hidden[len(prompt) - 1 :])


@pytest.mark.parametrize("lowering", LOWERINGS)
@case(
    "decoding.greedy-is-lossless",
    "Speculative greedy output is the target's own, token for token, at the verify pass's shape.",
    cause="a rejected draft that stays in the output or the KV, or a verify graph with old lengths",
)
def test_lossless(platform: Platform, attention: str, lowering: str, seed: int) -> None:
    asked = requests(seed)
    with decoder(platform, lowering=lowering, attention=attention) as speculative:
        ours = generate(speculative, asked)
        assert speculative.metrics.mean_acceptance_length > 1.3, "the pair accepts too little for this to say much"
    with decoder(platform, lowering=lowering, attention=attention, kind=None) as plain:
        assert ours == generate(plain, asked)


@case(
    "decoding.quick-check",
    "Speculative greedy output is the target's own in the platform's default lowering.",
    cause="run the other decoding cases: each looks at one thing",
    quick=True,
)
def test_quick(platform: Platform, seed: int) -> None:
    asked = requests(seed, count=3, tokens=12)
    with decoder(platform) as speculative, decoder(platform, kind=None) as plain:
        assert generate(speculative, asked) == generate(plain, asked)


@pytest.mark.parametrize("k", [1, 2, 3, 7])
@case(
    "decoding.lossless-for-every-k",
    "Output is the target's own for every number of draft tokens.",
    hazard="k-equals-2",
    cause="shapes or columns that assume one K",
)
def test_every_k(platform: Platform, k: int, seed: int) -> None:
    asked = requests(seed, count=3)
    with decoder(platform, k=k) as speculative, decoder(platform, k=k, kind=None) as plain:
        assert generate(speculative, asked) == generate(plain, asked)


@pytest.mark.parametrize("kind", [kind for kind in HEADS if kind != "eagle"])
@pytest.mark.parametrize("lowering", CAPTURED)
@case(
    "decoding.lossless-with-every-head",
    "Output is the target's own with every kind of drafter, auxiliary hidden states and own vocabularies included.",
    cause="hidden states handed over from the wrong rows or layers",
)
def test_heads(platform: Platform, lowering: str, kind: str, seed: int) -> None:
    asked = requests(seed, count=3)
    with (
        decoder(platform, lowering=lowering, kind=kind) as speculative,
        decoder(platform, lowering=lowering, kind=None) as plain,
    ):
        assert generate(speculative, asked) == generate(plain, asked)


@case(
    "decoding.tokens-are-the-targets",
    "Each greedy token is the most likely one of a dense float64 target, up to ties in float32.",
    cause="the target itself on this device: attention, positions or KV of verify and prefill",
)
def test_target(platform: Platform, attention: str, seed: int) -> None:
    asked = requests(seed, count=4)
    with decoder(platform, attention=attention) as speculative:
        results = generate(speculative, asked)
    for request, tokens in zip(asked, results, strict=True):
        logits = target_logits(request.prompt_token_ids, tokens[:-1])
        short = logits.max(-1).values - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert short.max() < 0.02, f"token {int(short.argmax())} falls {short.max():.3f} short of the best"


@pytest.mark.parametrize("lowering", CAPTURED)
@case(
    "decoding.acceptance-per-position",
    "The acceptance at each draft position is the same as in eager, to the last draft.",
    hazard="acceptance-hidden",
    cause="a graph that works and drafts other tokens: run the group drafting",
)
def test_acceptance(platform: Platform, attention: str, lowering: str, seed: int) -> None:
    asked, counts = requests(seed), []
    for way in ("eager", lowering):
        with decoder(platform, lowering=way, attention=attention) as made:
            made.generate(asked)
            counts.append((made.metrics.num_drafts, made.metrics.accepted, made.metrics.rounds))
    assert counts[1] == counts[0]
    assert sum(counts[0][1]) > 0


@case(
    "decoding.target-and-drafter-share-no-metadata",
    "The drafter's metadata is none of the target's: each graph owns what it reads between replays.",
    hazard="graph-reuses-target-metadata",
    cause="the drafter was captured with the target's metadata, which the next verify overwrites",
    quick=True,
)
def test_metadata(platform: Platform) -> None:
    with decoder(platform) as made:
        assert made.drafter is not None
        buffers = made.drafter.buffers
        own = _storages(buffers.first) | _storages(buffers.step)
        assert own.isdisjoint(_storages(made.target.buffers.metadata))


def _storages(metadata: AttentionMetadata) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in metadata.named_tensors("").values()}


@pytest.mark.parametrize("count", [1, 2, 3])
@case(
    "decoding.padded-batches",
    "Batches padded to a larger captured size decode what they decode at any padding.",
    hazard="num-reqs-unpadded",
    cause="host lengths, counts or tables with one entry a real request instead of one a padded one",
)
def test_padded(platform: Platform, attention: str, count: int, seed: int) -> None:
    asked = requests(seed, count=count, tokens=12)
    with decoder(platform, attention=attention) as speculative:
        ours = generate(speculative, asked)
    with decoder(platform, attention=attention, kind=None) as plain:
        assert ours == generate(plain, asked)


@case(
    "decoding.company-changes-nothing",
    "A request decodes the same alone and in a batch that others join and leave.",
    hazard="stale-padding-rows",
    cause="rows that keep something of the request that had them before",
)
def test_company(platform: Platform, seed: int) -> None:
    asked = requests(seed, count=6)
    with decoder(platform) as made:
        together = generate(made, asked)
        alone = [generate(made, [request])[0] for request in asked]
    assert together == alone


@case(
    "decoding.sampled-follows-the-target",
    "Sampled output has the target's distribution: chi-square of the second token against float64.",
    hazard="gumbel-seed-position",
    cause="draft noise and acceptance noise that are not independent, or the draft's probabilities taken for others",
    timeout=180,
)
def test_sampled(platform: Platform) -> None:
    prompt, draws, temperature = [5, 9, 2], 450, 1.3
    asked = [
        Request(prompt_token_ids=prompt, max_tokens=3, temperature=temperature, seed=1000 + i) for i in range(draws)
    ]
    with decoder(platform, sampled=True, k=2, max_num_requests=16, capture_sizes=(16,), max_model_len=32) as made:
        results = generate(made, asked)
        assert sum(made.metrics.accepted) > draws // 10
    first = (target_logits(prompt, [])[-1] / temperature).softmax(-1)
    second = torch.zeros(VOCAB, dtype=torch.float64)
    for token, probability in enumerate(first.tolist()):
        second += probability * (target_logits(prompt, [token])[-1] / temperature).softmax(-1)
    for position, wanted in ((0, first), (1, second)):
        tokens = torch.tensor([result[position] for result in results])
        counts = tokens.bincount(minlength=VOCAB).double()
        order = wanted.argsort(descending=True)
        likely = order[: max(2, int((wanted * draws >= 8).sum()))]
        got = torch.cat([counts[likely], (draws - counts[likely].sum())[None]])
        expected = torch.cat([wanted[likely] * draws, ((1 - wanted[likely].sum()) * draws).clamp(min=1e-9)[None]])
        freedom = len(got) - 1
        chi_square = float(((got - expected) ** 2 / expected).sum())
        limit = freedom + 4 * (2 * freedom) ** 0.5 + 6  # beyond p = 1e-4 for these degrees of freedom
        assert chi_square < limit, f"token {position}: chi-square {chi_square:.1f}, {freedom} degrees of freedom"


@case(
    "decoding.sampled-repeats",
    "A sampled request repeats with its seed, in any company, and changes with another.",
    hazard="gumbel-seed-position",
    cause="noise that depends on the row, the round or the padding",
)
def test_repeats(platform: Platform, seed: int) -> None:
    asked = requests(seed, count=4, temperature=1.0)
    with decoder(platform, sampled=True) as made:
        first = generate(made, asked)
        assert generate(made, asked[::-1])[::-1] == first
        others = [
            Request(prompt_token_ids=r.prompt_token_ids, max_tokens=r.max_tokens, temperature=1.0, seed=r.seed + 50)
            for r in asked
        ]
        assert generate(made, others) != first


@case(
    "decoding.stops-where-asked",
    "Generation ends at max_tokens exactly, or after the first stop token, however many drafts stood beyond it.",
    cause="accepted drafts past the stop are handed out",
    quick=True,
)
def test_stop(platform: Platform, seed: int) -> None:
    (request,) = requests(seed, count=1, tokens=15)
    with decoder(platform) as made:
        (full,) = generate(made, [request])
        assert len(full) == 15
        for limit in (1, 2, 6):
            cut = Request(prompt_token_ids=request.prompt_token_ids, max_tokens=limit)
            assert generate(made, [cut]) == [full[:limit]]
        stop = full[7]
        stopping = Request(prompt_token_ids=request.prompt_token_ids, max_tokens=15, stop_token_ids=[stop])
        (result,) = made.generate([stopping])
        assert result.token_ids == full[: full.index(stop) + 1]
        assert result.finish_reason == "stop"


@case(
    "decoding.up-to-max-model-len",
    "A request that runs into max_model_len ends there with the target's tokens.",
    hazard="max-len-clamp",
    cause="draft steps past the end that write another request's KV or read past the rotary table",
)
def test_end(platform: Platform, attention: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in (20, 29, 31)]
    asked = [Request(prompt_token_ids=prompt, max_tokens=50) for prompt in prompts]
    with decoder(platform, attention=attention, max_model_len=32) as speculative:
        ours = speculative.generate(asked)
    with decoder(platform, attention=attention, max_model_len=32, kind=None) as plain:
        theirs = plain.generate(asked)
    assert [r.token_ids for r in ours] == [r.token_ids for r in theirs]
    assert [len(r.token_ids) for r in ours] == [12, 3, 1]
    assert {r.finish_reason for r in ours} == {"length"}


@case(
    "decoding.too-long-is-refused-alone",
    "A prompt that can never fit is refused with a message; the others are decoded.",
    cause="one request's error ends the batch",
    quick=True,
)
def test_refused(platform: Platform, seed: int) -> None:
    asked = requests(seed, count=2, tokens=8)
    bad = Request(prompt_token_ids=[1] * 500, max_tokens=4)
    with decoder(platform) as made:
        results = made.generate([asked[0], bad, asked[1]])
        assert results[1].finish_reason == "refused"
        assert results[1].message
        assert [results[0].token_ids, results[2].token_ids] == generate(made, asked)


@case(
    "decoding.full-cache-waits",
    "With blocks for one request at a time, requests wait for each other and decode the same tokens.",
    cause="blocks handed out twice, or not given back",
)
def test_full_cache(platform: Platform, seed: int) -> None:
    asked = requests(seed, count=4, tokens=12)
    with decoder(platform) as roomy:
        expected = generate(roomy, asked)
    with decoder(platform, num_blocks=6) as tight:
        assert generate(tight, asked) == expected
        assert tight.allocator.num_free == tight.allocator.capacity


@case(
    "decoding.chunked-prompts",
    "A prompt prefilled in small chunks decodes the same tokens as in one.",
    cause="the drafter's KV at chunk borders, or positions that restart with a chunk",
)
def test_chunks(platform: Platform, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    asked = [Request(prompt_token_ids=torch.randint(0, VOCAB, (50,), generator=generator).tolist(), max_tokens=12)]
    with decoder(platform, prefill_sizes=(64,)) as whole, decoder(platform, prefill_chunk=7) as chunked:
        assert generate(chunked, asked) == generate(whole, asked)
        assert chunked.metrics.accepted == whole.metrics.accepted


@case(
    "decoding.merged-propose-is-one-launch",
    "Over whole generations the merged lowering launches one draft graph a round.",
    cause="the propose is split over several graphs, or run once a request",
    needs=("merged_loop",),
    quick=True,
)
def test_launches(platform: Platform, seed: int) -> None:
    with decoder(platform, lowering="merged") as made:
        assert made.drafter is not None
        assert made.drafter.runner is not None
        made.generate(requests(seed, count=2, tokens=12))
        # The first propose of a request may come in a round without a verify.
        assert made.metrics.rounds <= made.drafter.runner.launches <= made.metrics.rounds + 2
