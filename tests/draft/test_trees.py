"""The tree that is drafted is the one that a float64 search finds, in every lowering, whatever the cache holds."""

from __future__ import annotations

import pytest
import torch
from draft.pairs import VOCAB, make_head, make_target
from draft.rounds import LOWERINGS, make_drafter
from draft.tree_oracles import DenseTree, PathLogits, block_tree, dense_tree, paths_of
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from specgraph_conformance.draft_oracles import Context, dense_logits

from specgraph.draft import DraftTree, ProposeBatch

LENGTH, BLOCK = 48, 4
PARALLEL = ("dflash", "peagle")


def disturbed(kind: str, dtype: torch.dtype, seed: int):
    """A head whose logits depend on the seed; the same values in every dtype."""
    head = make_head(kind, make_target(dtype))
    for name, weight in head.weights().items():
        if "lm_head" in name:
            noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)) * 0.3
            weight.copy_(weight + noise.to(torch.float32).to(dtype))
    return head


@st.composite
def shapes(draw) -> DraftTree:
    steps, top_k = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    most = min(top_k + (steps - 1) * top_k**2 + 1, 24)
    return DraftTree(num_steps=steps, top_k=top_k, num_draft_tokens=draw(st.integers(steps + 1, most)))


def a_round(config, aux_size: int, g: torch.Generator, starts: list[int], counts: list[int]) -> ProposeBatch:
    per_request = -(-(LENGTH + config.scratch_tokens) // BLOCK)
    n, q = len(starts), config.query_len
    return ProposeBatch(
        sampled_token_ids=torch.randint(0, VOCAB, (n, q), generator=g),
        num_sampled=torch.tensor(counts, dtype=torch.int32),
        start_positions=torch.tensor(starts),
        aux_hidden=torch.randn(n * q, aux_size, generator=g),
        block_table=(torch.randperm(n * per_request, generator=g) + 1).view(n, -1).int(),
    )


REQUESTS = st.lists(st.tuples(st.integers(0, LENGTH - 1), st.integers(1, 5)), min_size=1, max_size=3)


def a_propose(tree: DraftTree, kind: str, lowering: str, requests: list[tuple[int, int]], seed: int):
    """A propose over caches with junk: the drafter, its drafts, and each request as it was before."""
    g = torch.Generator().manual_seed(seed)
    head = disturbed(kind, torch.float32, seed)
    drafter = make_drafter(
        head, lowering, "device", num_speculative_tokens=tree.num_steps, tree=tree, max_num_requests=3,
        max_model_len=LENGTH, capture_sizes=[3], prefill="eager",
    )  # fmt: skip
    for cache in drafter.caches:  # whatever an earlier request left
        for part in cache:
            part[1:].copy_(torch.randn(part[1:].shape, generator=g))
    block = tree.num_steps if kind in PARALLEL else 0  # its last positions are behind the accepted rows
    starts = [min(start, LENGTH - 2 - tree.num_steps - block) for start, _ in requests]
    counts = [min(count, tree.num_steps + 1) for _, count in requests]
    batch = a_round(drafter.config, head.aux_size, g, starts, counts)
    before = [[part.clone() for part in cache] for cache in drafter.caches]
    with torch.inference_mode():
        drafts = drafter.propose(batch)
    assert drafter.launches["propose"] == (1 if lowering == "merged" else drafter.launches["propose"])
    for cache in drafter.caches:
        assert not cache.key[0].any(), "the null block was written"
    offset, given = drafter.position_offset, []
    for r, (start, count) in enumerate(zip(starts, counts, strict=True)):
        own = batch.block_table[r].long()
        keys, values = ([cache[i][own].flatten(0, 1)[: start + offset] for cache in before] for i in (0, 1))
        rows = slice(r * drafter.config.query_len, r * drafter.config.query_len + count)
        tokens, hidden = batch.sampled_token_ids[r, :count], batch.aux_hidden[rows]
        given.append(Context(tokens, hidden, start + offset, keys, values))
    return drafts, given


def agree(drafts, tree: DraftTree, wanted: list[DenseTree]) -> bool:
    """Return whether any tree was compared; one of which another is as good is not."""
    clear = [r for r, each in enumerate(wanted) if each.margin > 1e-4]
    for r in clear:
        paths = paths_of(drafts.token_ids[r].tolist(), drafts.parents[r].tolist())
        assert len(set(paths)) == len(paths) == tree.num_draft_tokens - 1
        assert set(paths) == wanted[r].paths
    return bool(clear)


@settings(max_examples=30, phases=[Phase.generate])
@given(
    shapes(), st.sampled_from(["eagle3", "eagle", "mtp", "draft-model"]), st.sampled_from(LOWERINGS), REQUESTS,
    st.integers(0, 2**30),
)  # fmt: skip
def test_the_tree_is_the_one_that_a_search_finds(tree, kind, lowering, requests, seed):
    drafts, given = a_propose(tree, kind, lowering, requests, seed)
    oracle = disturbed(kind, torch.float64, seed)
    assume(agree(drafts, tree, [dense_tree(PathLogits(oracle, each), tree) for each in given]))


@pytest.mark.hazard("parallel-block-rows")
@settings(max_examples=30, phases=[Phase.generate])
@given(shapes(), st.sampled_from(PARALLEL), st.sampled_from(LOWERINGS), REQUESTS, st.integers(0, 2**30))
def test_a_parallel_drafter_s_tree_holds_the_best_of_all_paths(tree, kind, lowering, requests, seed):
    drafts, given = a_propose(tree, kind, lowering, requests, seed)
    oracle = disturbed(kind, torch.float64, seed)
    logits = [dense_logits(oracle, each, [0] * tree.num_steps)[0] for each in given]
    assume(agree(drafts, tree, [block_tree(each, oracle.draft_to_target, tree) for each in logits]))
