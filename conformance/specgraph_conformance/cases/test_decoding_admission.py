"""Admission: accepted, refused and cancelled requests, their KV blocks, and metrics without drafts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from specgraph.attention import AttentionLayer, allocate_caches
from specgraph.device import Platform
from specgraph.errors import CapacityError
from specgraph_run.decoder import Chunk, Request, SpeculativeDecoder

from specgraph_conformance.case import case
from specgraph_conformance.decode_rig import decoder, generate, requests
from specgraph_conformance.rig import expect_refusal, on_host
from specgraph_conformance.tiny_models import VOCAB


@case(
    "decoding.cancelled-requests-end",
    "A cancelled request, running or waiting, gets one last chunk without tokens; the others decode as they do alone, "
    "and all KV blocks are free in the end.",
    hazard="cancel-ends-another",
    cause="cancel() takes another request out of the batch, or keeps the blocks of the one that it takes out",
    quick=True,
)
def test_cancel(platform: Platform, seed: int) -> None:
    asked = requests(seed, count=5, tokens=12)
    with decoder(platform) as made:
        alone = [generate(made, [request])[0] for request in asked]
        ids = [made.add(request) for request in asked]
        chunks = list(made.step())
        for victim in (ids[1], ids[4]):  # three run, two wait
            assert made.cancel(victim), f"request {victim} is unfinished, and cancel() says that it is not"
        unfinished = made.num_unfinished
        assert not made.cancel(ids[4] + 1), "cancel() ended a request although it was given the id of none"
        assert made.num_unfinished == unfinished
        while made.num_unfinished:
            chunks += made.step()
        for number, request_id in enumerate(ids):
            mine = [chunk for chunk in chunks if chunk.request == request_id]
            if number in (1, 4):
                last = Chunk(request_id, [], 0, "cancelled")
                assert mine[-1] == last, f"the last chunk of cancelled request {number} is {mine[-1]}"
                assert [chunk.finish_reason for chunk in mine[:-1]] == [None] * (len(mine) - 1)
            else:
                tokens = [token for chunk in mine for token in chunk.token_ids]
                assert tokens == alone[number], f"request {number}, which nobody cancelled, got other tokens than alone"
        free, capacity = made.allocator.num_free, made.allocator.capacity
        assert free == capacity, f"{free} of {capacity} KV blocks are free after every request has ended"


@case(
    "decoding.cancelled-requests-write-nothing",
    "Once the KV blocks of cancelled requests are free, no round writes them.",
    hazard="cancelled-request-lives-on",
    cause="the host forgets a cancelled request and the device goes on with its row: others get its blocks meanwhile",
)
def test_cancelled_blocks(platform: Platform, seed: int) -> None:
    asked = [replace(request, max_tokens=60) for request in requests(seed, count=3)]
    with decoder(platform, max_model_len=128) as made:
        ids = [made.add(request) for request in asked]
        for _ in range(3):
            made.step()
        free = made.allocator.num_free
        ends = ids[0], ids[2]  # the first row and the last row
        blocks = [block for state in made.rounds.running if state.index in ends for block in state.blocks]
        assert all(made.cancel(each) for each in ends)
        while made.allocator.num_free < free + len(blocks):
            assert made.step(), "the other request ended before the blocks of the cancelled ones were free"
        assert made.drafter is not None
        caches = [
            tensor for cache in (*made.target.caches, *made.drafter.caches) for tensor in (cache.key, cache.value)
        ]
        platform.synchronize()
        for cache in caches:
            cache[blocks] = 7.0
        for _ in range(3):
            made.step()
        platform.synchronize()
        for number, cache in enumerate(caches):
            assert (on_host(cache)[blocks] == 7.0).all(), f"KV tensor {number}: freed blocks were written"


@pytest.mark.parametrize("prompt", [14, 15])
@case(
    "decoding.what-fits-is-taken",
    "A request is taken by a cache that has blocks for its prompt, its max_tokens and two passes of K + 1 rows, and "
    "refused with both numbers by a cache of one block less.",
    hazard="kv-blocks-needed",
    cause="the blocks that a request may need, counted one too many or too few",
)
def test_fits(platform: Platform, prompt: int, seed: int) -> None:
    (request,) = requests(seed, count=1, tokens=8)
    request = Request(prompt_token_ids=[*request.prompt_token_ids, *[7] * 20][:prompt], max_tokens=8)
    with decoder(platform) as roomy:
        (expected,) = generate(roomy, [request])
        block, rows = roomy.config.block_size, roomy.query_len
    positions = [*range(prompt + request.max_tokens + 2 * rows)]
    needed = len({position // block for position in positions})
    with decoder(platform, num_blocks=1 + needed) as exact:
        (result,) = exact.generate([request])
        assert result.finish_reason == "length", f"{needed} blocks for {len(positions)} positions: {result.message}"
        assert result.token_ids == expected
    with decoder(platform, num_blocks=needed) as small:
        what = f"a request that needs {needed} blocks, by a cache of {needed - 1},"
        expect_refusal(lambda: small.add(request), what, rf"\b{needed}\b.*\b{needed - 1}\b")
        assert small.num_unfinished == 0


@pytest.mark.parametrize("what", ["rows", "blocks"])
@case(
    "decoding.who-waits-longest-joins",
    "Waiting requests join in the order in which they were added, also where a later one would fit and the first of "
    "them does not.",
    hazard="waiting-request-overtaken",
    cause="the batch is filled with whatever fits: a long request waits for as long as short ones come",
)
def test_order(platform: Platform, what: str, seed: int) -> None:
    first, long, *rest = requests(seed, count=6, tokens=12)
    first, long = replace(first, max_tokens=14), replace(long, max_tokens=60)
    options: dict[str, Any] = {}
    if what == "blocks":  # enough for the long request alone, or for two of the others
        with decoder(platform) as roomy:
            block, rows = roomy.config.block_size, roomy.query_len
        options["num_blocks"] = 1 + -(-(len(long.prompt_token_ids) + long.max_tokens + 2 * rows) // block)
    with decoder(platform, max_model_len=128, **options) as made:
        ids = [made.add(request) for request in (first, long, *rest)]
        seen: list[int] = []
        while made.num_unfinished:
            seen += [chunk.request for chunk in made.step() if chunk.token_ids and chunk.request not in seen]
    assert sorted(seen) == sorted(ids), "a request ended without a token"
    assert seen == ids, f"requests {ids} were added in this order, and had their first tokens in the order {seen}"


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "empty-prompt": ({"prompt_token_ids": []}, "no tokens"),
    "token-past-the-vocabulary": ({"prompt_token_ids": [1, VOCAB, 2]}, rf"\b{VOCAB}\b"),
    "negative-token": ({"prompt_token_ids": [1, 2, -3]}, "-3"),
    "no-tokens-asked": ({"max_tokens": 0}, "max_tokens"),
    "seed-of-65-bits": ({"seed": 1 << 64}, "seed"),
    "seed-too-large": ({"seed": 1 << 63}, "seed"),
    "seed-too-small": ({"seed": -(1 << 63) - 1}, "seed"),
    "temperature-of-a-greedy-decoder": ({"temperature": 0.7}, "sampled"),
    "tiny-temperature": ({"temperature": 1e-9}, "temperature"),
    "prompt-of-max-model-len": ({"prompt_token_ids": [1] * 96}, r"\b95\b"),
}
"""Name -> the wrong field of a request, and the text that the error must have."""


@pytest.mark.parametrize("wrong", WRONG)
@case(
    "decoding.wrong-requests-refused",
    "A request that is wrong in itself is refused by an error that names what is wrong, and nothing was queued.",
    hazard="wrong-request-taken",
    cause="Request or check_request: a bound that is off by one, or an error that names another value",
    quick=True,
)
def test_wrong(platform: Platform, wrong: str) -> None:
    fields, said = WRONG[wrong]
    with decoder(platform, decode="eager") as made:
        given: dict[str, Any] = {"prompt_token_ids": [5, 9, 2], "max_tokens": 4} | fields
        what = (
            f"a request with {wrong.replace('-', ' ')} ({', '.join(f'{n} {str(v)[:30]}' for n, v in fields.items())})"
        )
        expect_refusal(lambda: made.add(Request(**given)), what, said)
        assert made.num_unfinished == 0
        for bound in (-(1 << 63), (1 << 63) - 1):
            Request(prompt_token_ids=[5], max_tokens=1, seed=bound)


@case(
    "decoding.target-alone",
    "Without a drafter, and without a number of rows asked for, a decoder runs one row per request, decodes the tokens "
    "of the speculative one, and counts no drafts.",
    hazard="metrics-without-drafts",
    cause="a default that is only right with a drafter, or a mean over no drafts",
    quick=True,
)
def test_alone(platform: Platform, seed: int) -> None:
    asked = requests(seed, count=3, tokens=9)
    with decoder(platform) as speculative:
        expected = generate(speculative, asked)
        target, config, options = speculative.target.model, speculative.config, speculative.options
    made = SpeculativeDecoder(target, None, platform, config, options)
    try:
        made.capture()
        assert made.query_len == 1, f"{made.query_len} rows per request, where nothing is drafted"
        assert generate(made, asked) == expected
        counts = made.metrics.accepted, made.metrics.num_drafts
        assert counts == ([], 0), f"accepted drafts by position, and drafts, are {counts} where nothing is drafted"
        try:
            mean = made.metrics.mean_acceptance_length
        except ArithmeticError as error:
            raise AssertionError(f"the mean acceptance length over no drafts: {error}") from error
        assert mean == 1.0, f"the mean acceptance length over no drafts is {mean:g}"
    finally:
        made.close()


@case(
    "decoding.cache-that-does-not-fit",
    "KV caches that the device has no memory for are a CapacityError that names their size, and the platform stays "
    "usable.",
    hazard="cache-too-large",
    cause="the allocator's error of this device is no RuntimeError, or the size in the message is wrong",
)
def test_cache(platform: Platform) -> None:
    layers = [AttentionLayer(2, 2, 64, 0.125)] * 3
    blocks = 1 << 36
    tebibytes = 3 * 2 * 2 * 64 * 4 * 16 * blocks // (1 << 40)  # layers, key and value, heads, head_dim, float32, block
    expect_refusal(
        lambda: allocate_caches(layers, blocks, 16, torch.float32, platform.device),
        f"a KV cache of {tebibytes} TiB",
        rf"\b{tebibytes * 1024}\.00 GiB",
        (CapacityError,),
    )
    assert torch.ones(4, device=platform.device).sum().item() == 4.0
