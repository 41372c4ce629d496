"""Graphs of a drafter: those that it captures, and the one that serves a batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from specgraph.capture import BatchDescriptor, GraphRunner
from specgraph.device import Platform
from specgraph.errors import CaptureError

from specgraph_conformance.case import case
from specgraph_conformance.draft_comparison import rig
from specgraph_conformance.draft_rig import make_batches, make_config
from specgraph_conformance.rig import adding, expect_refusal, on_host


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
        launched = runner.launches
        assert made.round(batch).from_graph
        assert runner.launches > launched
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
    for k in (1, 5):
        made = rig(platform, make_config(decode="merged", k=k), "paged")
        assert made.drafter.graphs is not None
        before = made.drafter.graphs.launches
        made.round(make_batches(made.config, made.head.aux_size, seed, [3])[0])
        assert made.drafter.graphs.launches == before + 1
        made.close()


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
        made.round(batch)
    platform.synchronize()
    before = platform.memory()
    for i in range(100):
        made.round(batches[i % 4])
    platform.synchronize()
    after = platform.memory()
    assert after.reserved <= before.reserved
    assert after.allocated <= before.allocated
