"""The graphs of a drafter, and the inputs and results of a propose: each input has its effect, and results are
copies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from specgraph.capture import BatchDescriptor, GraphRunner
from specgraph.device import Platform
from specgraph.draft import DraftTree
from specgraph.errors import CaptureError, StaleInputError

from specgraph_conformance.case import case
from specgraph_conformance.draft_comparison import CAPTURED, assert_same, rig, run
from specgraph_conformance.draft_rig import make_batches, make_config, num_blocks
from specgraph_conformance.rig import adding, expect_equal, expect_refusal, on_host
from specgraph_conformance.tiny_models import make_head


@case(
    "drafting.blocks-may-move",
    "The same requests, handed over again with other KV blocks, draft the same tokens.",
    hazard="stale-metadata-copied-late",
    cause="the block table is copied after the replay, or the slots are computed from an old one",
)
def test_blocks(platform: Platform, seed: int) -> None:
    config = make_config(decode="auto")
    made = rig(platform, config, "paged")
    (batch,) = make_batches(config, made.head.aux_size, seed, [4])
    first = made.propose_to_host(batch)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(2):
        order = (torch.randperm(num_blocks(config) - 1, generator=generator) + 1).tolist()
        moved = [[order.pop() for _ in row] for row in batch.blocks]
        for cache in made.caches:
            for tensor in cache:
                old = tensor.clone()
                for before, after in zip(batch.blocks, moved, strict=True):
                    tensor[after] = old[before]
        batch = replace(batch, blocks=moved)
        again = made.propose_to_host(batch)
        expect_equal(again.token_ids, first.token_ids, "the drafts after the requests' KV moved to other blocks")
        expect_equal(again.hidden, first.hidden, "the hidden states after the requests' KV moved to other blocks")


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
    "drafting.attention-is-captured",
    "In a captured lowering, drafts depend on the KV of earlier rounds.",
    hazard="metadata-none-at-capture",
    cause="the graph was captured without attention metadata, so attention was left out",
)
def test_attends(platform: Platform, seed: int) -> None:
    config = make_config(decode="auto")
    made = rig(platform, config, "paged")
    (batch,) = make_batches(config, made.head.aux_size, seed, [4])
    first = made.propose_to_host(batch)
    for cache in made.caches:
        cache.value.mul_(-2)
    assert not torch.equal(made.propose_to_host(batch).hidden, first.hidden), (
        "all values in the KV cache changed, and the hidden states did not: the graph has no attention"
    )


@case(
    "drafting.moved-weights-are-noticed",
    "With check_inputs, a replay after the weights were replaced by other tensors is a StaleInputError.",
    hazard="weights-moved",
    cause="addresses aren't compared with those of the capture",
)
def test_weights(platform: Platform, seed: int) -> None:
    made = rig(platform, make_config(decode="auto", check_inputs=True), "paged")
    (batch,) = make_batches(made.config, made.head.aux_size, seed, [2])
    made.propose_to_host(batch)
    head: Any = made.head
    (kept,) = head.layers
    fields = {name: getattr(kept, name) for name in type(kept).__slots__}
    moved = type(kept)(**{n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in fields.items()})
    what = "a replay after the weights were replaced by other tensors"
    with pytest.MonkeyPatch.context() as patch:  # other cases use the same head
        patch.setattr(head, "layers", (moved,))
        expect_refusal(lambda: made.propose(batch), what, "", (StaleInputError,))


RESULTS: dict[str, dict[str, Any]] = {
    "chain": {"sampled": True},
    "tree": {"tree": DraftTree(num_steps=3, top_k=2, num_draft_tokens=6)},
}


@pytest.mark.parametrize("lowering", ["eager", "auto"])
@pytest.mark.parametrize("shape", RESULTS)
@case(
    "drafting.results-belong-to-the-caller",
    "The drafts, distributions and parents of a round don't change with the next ones.",
    hazard="output-aliases-graph-buffer",
    cause="propose hands out the graph's own buffer instead of a copy",
    quick=True,
)
def test_results(platform: Platform, lowering: str, shape: str, seed: int) -> None:
    made = rig(platform, make_config(decode=lowering, **RESULTS[shape]), "paged")
    first, *others = make_batches(made.config, made.head.aux_size, seed, [4, 4, 4])
    drafts = made.propose(first)
    given = {"drafts": drafts.token_ids, "distributions": drafts.probs, "parents": drafts.parents}
    kept = {name: (tensor, on_host(tensor)) for name, tensor in given.items() if tensor is not None}
    assert len(kept) == 2
    for batch in others:
        made.propose(batch)
    platform.synchronize()
    for name, (tensor, before) in kept.items():
        expect_equal(on_host(tensor), before, f"the first round's {name}, after others")


@case(
    "drafting.named-sizes-are-captured",
    "Each size that the user names is captured as named, with K + 1 rows per request, and no other size is captured.",
    hazard="size-truncated",
    cause="sizes are rounded or cut to a multiple without a word",
)
def test_sizes(platform: Platform) -> None:
    sizes = (1, 3, 5, 7)
    made = rig(platform, make_config(decode="auto", max_num_requests=7, capture_sizes=sizes), "paged")
    assert made.drafter.graphs is not None
    seen = made.drafter.graphs.descriptors
    captured = sorted({d.num_requests for d in seen if d.phase != "prefill"})
    assert captured == list(sizes), f"sizes {list(sizes)} were named and {captured} captured"


@case(
    "drafting.every-batch-has-its-graph",
    "After capture(), each batch up to the maximum is served by a graph captured then.",
    hazard="capture-key-mismatch",
    cause="capture and dispatch build the key of a graph in two places",
)
def test_keys(platform: Platform, seed: int) -> None:
    made = rig(platform, make_config(decode="auto", capture_sizes=(1, 2, 4)), "paged")
    runner = made.drafter.graphs
    assert runner is not None
    before = list(runner.descriptors)
    for batch in make_batches(made.config, made.head.aux_size, seed, [1, 2, 3, 4]):
        launched = made.drafter.launches["propose"]
        assert made.propose_to_host(batch).from_graph
        assert made.drafter.launches["propose"] > launched
    assert runner.descriptors == before


@case(
    "drafting.nothing-is-captured-at-request-time",
    "A propose never captures: without capture() it is a CaptureError that names what is missing.",
    hazard="capture-at-request-time",
    cause="the runner captures what it lacks when a request comes",
)
def test_request_time(platform: Platform, seed: int) -> None:
    made = rig(platform, make_config(decode="auto"), "paged")
    assert made.drafter.graphs is not None
    assert made.drafter.graphs.graph_count > 0, "capture() captured nothing: it is left to the first request"
    (batch,) = make_batches(made.config, made.head.aux_size, seed, [2])
    made.drafter.graphs.close()
    with pytest.raises(CaptureError):
        made.propose(batch)
    assert made.drafter.graphs.graph_count == 0


@case(
    "drafting.graph-of-another-k-refused",
    "A graph captured for one number of draft tokens never serves another.",
    hazard="dynamic-k-negative",
    cause="the key of a captured graph leaves out K",
    quick=True,
)
def test_other_k(platform: Platform) -> None:
    x = torch.zeros(4, device=platform.device)
    runner = GraphRunner(platform, lambda: {"x": x})
    runner.capture(BatchDescriptor("step", 4, 1, 3), adding(x, 1))
    expect_refusal(
        lambda: runner.replay(BatchDescriptor("step", 4, 1, 2)),
        "a replay for K = 2, where only K = 3 was captured,",
        "never captured",
        (CaptureError,),
    )
    runner.capture(BatchDescriptor("step", 4, 1, 2), adding(x, 100))
    x.zero_()
    runner.replay(BatchDescriptor("step", 4, 1, 2))
    platform.synchronize()
    assert on_host(x).tolist() == [100.0] * 4
    runner.close()


@case(
    "drafting.live-graphs-are-budgeted",
    "A runner stops at the platform's limit of live graphs with an error, before the device runs out.",
    hazard="exec-budget",
    cause="max_live_graphs isn't asked before a capture",
    quick=True,
)
def test_budget(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    limited = replace(platform.capabilities, max_live_graphs=2)
    monkeypatch.setattr(type(platform), "capabilities", property(lambda self: limited))
    x = torch.zeros(4, device=platform.device)
    runner = GraphRunner(platform, lambda: {"x": x})
    for n in (1, 2):
        runner.capture(BatchDescriptor("step", n, 1, 3), adding(x, 1))
    expect_refusal(
        lambda: runner.capture(BatchDescriptor("step", 3, 1, 3), adding(x, 1)),
        "a third graph, on a platform that allows 2,",
        "",
        (CaptureError,),
    )
    runner.close()


@case(
    "drafting.merged-is-one-launch",
    "The merged lowering replays one graph per propose, for every K.",
    cause="the loop is split over several graphs",
    needs=("merged_loop",),
    quick=True,
)
def test_one_launch(platform: Platform, seed: int) -> None:
    made = rig(platform, make_config(decode="merged", k=5, draft_schedule={1: 5, 4: 1}), "paged")
    for number, batch in enumerate(make_batches(made.config, made.head.aux_size, seed, [1, 3, 1]), 1):
        made.propose_to_host(batch)
        assert made.drafter.launches["propose"] == number


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
