"""Requests that come and go: padding, other requests, chunked prompts, stops, max_model_len, a full cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from specgraph.device import Platform
from specgraph_run.decoder import Request
from torch import Tensor

from specgraph_conformance.case import case
from specgraph_conformance.decode_rig import decoder, expect_lossless, generate, requests
from specgraph_conformance.tiny_models import VOCAB


@case(
    "decoding.target-and-drafter-share-no-metadata",
    "Target and drafter share no metadata tensor that one of them rewrites while the other's graphs still read it.",
    hazard="graph-reuses-target-metadata",
    cause="the drafter was captured with the target's metadata, which the next verify overwrites",
    quick=True,
)
def test_metadata(platform: Platform) -> None:
    with decoder(platform) as made:
        assert made.drafter is not None
        drafter, target = made.drafter.read_set(), made.target.verify_program.named_tensors()
        own = _storages(drafter, "buffers.first.") | _storages(drafter, "buffers.step.")
        assert own.isdisjoint(_storages(target, "verify.metadata.")), (
            "the drafter's graphs read metadata that the target's verify rewrites"
        )


def _storages(named: Mapping[str, Tensor], prefix: str) -> set[int]:
    """Return the addresses of all tensors except the block table, which target and drafter share and no graph
    writes."""
    own = {name: tensor for name, tensor in named.items() if name.startswith(prefix)}
    assert own, f"no tensor is called {prefix}"
    del own[f"{prefix}block_table"]
    return {tensor.untyped_storage().data_ptr() for tensor in own.values()}


@pytest.mark.parametrize("count", [1, 2])
@case(
    "decoding.padded-batches",
    "Batches padded to a larger captured size decode the same tokens.",
    hazard="num-reqs-unpadded",
    cause="host lengths, counts or tables with one entry per real request instead of one per padded request",
)
def test_padded(platform: Platform, attention: str, count: int, seed: int) -> None:
    expect_lossless(platform, requests(seed, count=count, tokens=12), attention=attention)


@case(
    "decoding.stops-where-asked",
    "Generation ends at max_tokens exactly, or after the first stop token, also where accepted draft tokens follow it "
    "or another request goes on.",
    hazard="round-token-after-stop",
    cause="accepted drafts past the stop are handed out, or tokens of a round that was in flight",
    quick=True,
)
def test_stop(platform: Platform, seed: int) -> None:
    request, other = requests(seed, count=2, tokens=15)
    with decoder(platform) as made:
        full, kept = generate(made, [request, other])
        assert len(full) == 15
        for limit in (1, 2, 6):
            assert generate(made, [replace(request, max_tokens=limit), other]) == [full[:limit], kept]
        stop = full[7]
        result, _ = made.generate([replace(request, stop_token_ids=[stop]), other])
        assert result.token_ids == full[: full.index(stop) + 1]
        assert result.finish_reason == "stop"


@case(
    "decoding.each-request-has-its-stops",
    "Requests of one batch with different stop tokens each end at the first of their own, and at no other request's.",
    hazard="stops-of-one-request",
    cause="the batch is looked through for the stop tokens of one request only, or for those of all",
)
def test_own_stops(platform: Platform, seed: int) -> None:
    asked = requests(seed, count=3, tokens=24)
    with decoder(platform) as made:
        texts = generate(made, asked)
        wanted = list[list[int]]()
        for number, place in enumerate((12, 7, 2)):
            others = texts[(number + 1) % 3][-4:]  # another request's stop tokens, which this one does not generate
            stop = texts[number][place]
            stops = [stop, *(token for token in others if token not in texts[number])]
            asked[number] = replace(asked[number], stop_token_ids=stops)
            wanted.append(texts[number][: texts[number].index(stop) + 1])
        results = made.generate(asked)
    for number, (result, tokens) in enumerate(zip(results, wanted, strict=True)):
        assert (result.token_ids, result.finish_reason) == (tokens, "stop"), f"request {number} ended at another token"


@case(
    "decoding.metrics-count-accepted-drafts",
    "The metrics count accepted draft tokens: the tokens of each verify but the target's own one.",
    hazard="metrics-count-the-bonus",
    cause="the target's own token counts as accepted, or drafts of finished requests are left out",
)
def test_metrics(platform: Platform, seed: int) -> None:
    (asked,) = requests(seed, count=1, tokens=40)
    with decoder(platform) as made:
        # The first token comes from the prefill, and the last chunk may be cut at max_tokens.
        sizes = [len(chunk.token_ids) for chunk in made.stream([asked])][1:]
        metrics = made.metrics
        most = made.config.num_speculative_tokens
    assert metrics.num_drafts == len(sizes), f"{metrics.num_drafts} drafts were counted in {len(sizes)} verify passes"
    least = sum(sizes[:-1]) - len(sizes[:-1]) + sizes[-1] - 1
    cut = most + 1 - sizes[-1]
    seen = sum(metrics.accepted)
    assert least <= seen <= least + cut, (
        f"{seen} draft tokens count as accepted; {len(sizes)} verify passes gave {sum(sizes)} tokens, one of each the "
        f"target's own, and at most {cut} were cut off at the end"
    )
    assert metrics.mean_acceptance_length == pytest.approx(1 + seen / len(sizes))


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
    cause="one request's error ends the whole batch",
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
