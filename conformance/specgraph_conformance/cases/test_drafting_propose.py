"""The inputs of a propose: each has its effect, inert and padded requests have none, and rounds take no memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from specgraph.device import Platform

from specgraph_conformance.case import case
from specgraph_conformance.draft_comparison import CAPTURED, assert_same, rig, run
from specgraph_conformance.draft_rig import make_batches, make_config
from specgraph_conformance.rig import expect_equal
from specgraph_conformance.tiny_models import make_head


@pytest.mark.parametrize("lowering", CAPTURED)
@case(
    "drafting.every-input-is-seen",
    "Changing one input of a round (tokens, accepted counts, positions, hidden states, blocks) changes what eager "
    "changes, and nothing else.",
    hazard="stale-metadata-rebound",
    cause="a buffer is reassigned instead of written in place: the graph reads the old address",
)
def test_inputs(platform: Platform, lowering: str, seed: int) -> None:
    config, eager = make_config(decode=lowering), make_config()
    head = make_head("eagle", 1, platform.device)
    (a, b) = make_batches(config, head.aux_size, seed, [4, 4])
    batches = [a]
    for name in ("sampled_token_ids", "num_sampled", "aux_hidden"):
        batches.append(replace(a, **{name: getattr(b, name)}))
    batches += [replace(b, start_positions=a.start_positions, blocks=a.blocks), b]
    assert_same(run(rig(platform, config, "paged"), batches), run(rig(platform, eager, "paged"), batches))


@case(
    "drafting.padded-rows-write-nothing",
    "A padded batch writes KV only at the positions of its real requests: every other slot keeps its bits.",
    hazard="padded-rows-write-kv",
    cause="padded rows run with a slot of a real block instead of -1",
)
def test_padding_writes(platform: Platform, attention: str, seed: int) -> None:
    config = make_config(decode="auto", capture_sizes=(4,))
    made = rig(platform, config, attention)
    config = made.config
    full, small = make_batches(config, made.head.aux_size, seed, [4, 1])
    made.propose_to_host(full)
    before = made.host_caches()
    made.propose_to_host(small)
    q, k, block = config.query_len, config.num_speculative_tokens, config.block_size
    allowed: set[int] = set()
    for start, count, blocks in zip(small.start_positions, small.num_sampled, small.blocks, strict=True):
        for position in range(start, min(start + max(q, count + k), config.max_model_len)):
            allowed.add((blocks[position // block] - 1) * block + position % block)
    for (key, value), (old_key, old_value) in zip(made.host_caches(), before, strict=True):
        for new, old in ((key, old_key), (value, old_value)):
            changed = (new != old).flatten(2).any(dim=-1).flatten().nonzero().flatten().tolist()
            assert set(changed) <= allowed, f"slots {sorted(set(changed) - allowed)} were written"


@case(
    "drafting.inert-request-between-others",
    "Where only the device knows a round's numbers, an inert request between others changes nobody's drafts.",
    hazard="inert-request-between-others",
    cause="host lengths for as many requests as are live, and not up to the last live one",
)
def test_between(platform: Platform, attention: str, seed: int) -> None:
    made = rig(platform, make_config(decode="auto", capture_sizes=(4,)), attention)
    (batch,) = make_batches(made.config, made.head.aux_size, seed, [4])
    before = [(cache.key.clone(), cache.value.clone()) for cache in made.caches]
    expected = made.propose_to_host(batch)
    for cache, (key, value) in zip(made.caches, before, strict=True):
        cache.key.copy_(key)
        cache.value.copy_(value)
    counts = [count if r != 1 else 0 for r, count in enumerate(batch.num_sampled)]
    seen = made.propose_to_host(replace(batch, num_sampled=counts), host_numbers=False)
    for r in (0, 2, 3):
        expect_equal(seen.token_ids[r], expected.token_ids[r], f"drafts of request {r}, with request 1 inert")
        expect_equal(seen.hidden[r], expected.hidden[r], f"carried state of request {r}, with request 1 inert")


@case(
    "drafting.bound-tensors",
    "Tensors that an engine binds once, before the capture, draft what the same rounds draft when they are handed over "
    "in eager, and the rows that a larger batch left in them are inert.",
    hazard="stale-padding-rows",
    cause="the copy is not part of the graph, or padded requests of the engine's tensors stay alive",
)
def test_bound(platform: Platform, attention: str, seed: int) -> None:
    config = make_config(decode="auto", sampled=True)
    bound = rig(platform, config, attention, bound=True)
    batches = make_batches(bound.config, bound.head.aux_size, seed, [4, 1, 3, 4, 2])
    eager = rig(platform, make_config(sampled=True), attention)
    assert_same(run(bound, batches), run(eager, batches))


@case(
    "drafting.a-hundred-rounds-without-growth",
    "A hundred rounds of changing batches take no memory.",
    cause="a propose that allocates and keeps: graphs, events or tensors of each round",
    timeout=120,
)
def test_growth(platform: Platform, seed: int) -> None:
    made = rig(platform, make_config(decode="auto"), "paged")
    batches = make_batches(made.config, made.head.aux_size, seed, [4, 1, 3, 2])
    for batch in batches:
        made.propose_to_host(batch)
    platform.synchronize()
    before = platform.memory()
    for i in range(100):
        made.propose_to_host(batches[i % 4])
    platform.synchronize()
    after = platform.memory()
    assert after.reserved <= before.reserved
    assert after.allocated <= before.allocated
