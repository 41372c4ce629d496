"""Requests that join, wait or are cancelled, and their KV blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from specgraph_conformance.decode_rig import decoder, generate, requests
from specgraph_conformance.rig import expect_refusal, on_host
from specgraph_run.decoder import Request

from specgraph.device import Platform


@pytest.mark.hazard("cancelled-request-lives-on")
def test_cancelled_requests_write_nothing(platform: Platform, seed: int) -> None:
    """Once the KV blocks of cancelled requests are free, no round writes them."""
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
@pytest.mark.hazard("kv-blocks-needed")
def test_what_fits_is_taken(platform: Platform, prompt: int, seed: int) -> None:
    """A request is taken by a cache that has blocks for its prompt, its max_tokens and two passes of K + 1 rows, and
    refused with both numbers by a cache of one block less."""
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
@pytest.mark.hazard("waiting-request-overtaken")
def test_who_waits_longest_joins(platform: Platform, what: str, seed: int) -> None:
    """Waiting requests join in the order in which they were added, also where a later one would fit and the first of
    them does not."""
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
