"""The graphs of a drafter, and the inputs and results of a propose: each input has its effect, and results are
copies."""

from __future__ import annotations

from dataclasses import replace

import pytest
from specgraph.device import Platform

from specgraph_conformance.case import case
from specgraph_conformance.draft_comparison import CAPTURED, assert_same, rig, run
from specgraph_conformance.draft_rig import make_batches, make_config
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
