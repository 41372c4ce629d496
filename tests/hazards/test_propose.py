"""The graphs of a drafter, and the inputs and results of a propose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from specgraph_conformance.draft_comparison import rig
from specgraph_conformance.draft_rig import make_batches, make_config, num_blocks
from specgraph_conformance.rig import expect_equal, on_host

from specgraph.device import Platform
from specgraph.draft import DraftTree
from specgraph.errors import CaptureError


@pytest.mark.hazard("stale-metadata-copied-late")
def test_blocks_may_move(platform: Platform, seed: int) -> None:
    """The same requests, handed over again with other KV blocks, draft the same tokens."""
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


@pytest.mark.hazard("metadata-none-at-capture")
def test_attention_is_captured(platform: Platform, seed: int) -> None:
    """In a captured lowering, drafts depend on the KV of earlier rounds."""
    config = make_config(decode="auto")
    made = rig(platform, config, "paged")
    (batch,) = make_batches(config, made.head.aux_size, seed, [4])
    first = made.propose_to_host(batch)
    for cache in made.caches:
        cache.value.mul_(-2)
    assert not torch.equal(made.propose_to_host(batch).hidden, first.hidden), (
        "all values in the KV cache changed, and the hidden states did not: the graph has no attention"
    )


RESULTS: dict[str, dict[str, Any]] = {
    "chain": {"sampled": True},
    "tree": {"tree": DraftTree(num_steps=3, top_k=2, num_draft_tokens=6)},
}


@pytest.mark.parametrize("lowering", ["eager", "auto"])
@pytest.mark.parametrize("shape", RESULTS)
@pytest.mark.hazard("output-aliases-graph-buffer")
def test_results_belong_to_the_caller(platform: Platform, lowering: str, shape: str, seed: int) -> None:
    """The drafts, distributions and parents of a round don't change with the next ones."""
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


@pytest.mark.hazard("size-truncated")
def test_named_sizes_are_captured(platform: Platform) -> None:
    """Each size that the user names is captured as named, and no other size is."""
    sizes = (1, 3, 5, 7)
    made = rig(platform, make_config(decode="auto", max_num_requests=7, capture_sizes=sizes), "paged")
    assert made.drafter.graphs is not None
    seen = made.drafter.graphs.descriptors
    captured = sorted({d.num_requests for d in seen if d.phase != "prefill"})
    assert captured == list(sizes), f"sizes {list(sizes)} were named and {captured} captured"


@pytest.mark.hazard("capture-key-mismatch")
def test_every_batch_has_its_graph(platform: Platform, seed: int) -> None:
    """After capture(), each batch up to the maximum is served by a graph captured then."""
    made = rig(platform, make_config(decode="auto", capture_sizes=(1, 2, 4)), "paged")
    runner = made.drafter.graphs
    assert runner is not None
    before = list(runner.descriptors)
    for batch in make_batches(made.config, made.head.aux_size, seed, [1, 2, 3, 4]):
        launched = made.drafter.launches["propose"]
        assert made.propose_to_host(batch).from_graph
        assert made.drafter.launches["propose"] > launched
    assert runner.descriptors == before


@pytest.mark.hazard("capture-at-request-time")
def test_nothing_is_captured_at_request_time(platform: Platform, seed: int) -> None:
    """A propose never captures: without capture() it is a CaptureError that names what is missing."""
    made = rig(platform, make_config(decode="auto"), "paged")
    assert made.drafter.graphs is not None
    assert made.drafter.graphs.graph_count > 0, "capture() captured nothing: it is left to the first request"
    (batch,) = make_batches(made.config, made.head.aux_size, seed, [2])
    made.drafter.graphs.close()
    with pytest.raises(CaptureError):
        made.propose(batch)
    assert made.drafter.graphs.graph_count == 0


def test_merged_is_one_launch(platform: Platform, seed: int) -> None:
    """The merged lowering replays one graph per propose, for every K."""
    made = rig(platform, make_config(decode="merged", k=5, draft_schedule={1: 5, 4: 1}), "paged")
    for number, batch in enumerate(make_batches(made.config, made.head.aux_size, seed, [1, 3, 1]), 1):
        made.propose_to_host(batch)
        assert made.drafter.launches["propose"] == number
