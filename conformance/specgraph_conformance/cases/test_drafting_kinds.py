"""Each kind of drafter: same bits as eager, same drafts as float64, prompts in every graph mode, K by batch size, and
sampling."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from specgraph.device import Platform

from specgraph_conformance.case import case
from specgraph_conformance.draft_comparison import (
    TOLERANCE,
    away_from_the_end,
    compare,
    expect_oracle,
    float64_head,
    follow_oracle,
    rig,
)
from specgraph_conformance.draft_oracles import dense_prompt
from specgraph_conformance.draft_rig import HostBatch, make_batches, make_config, make_prompt
from specgraph_conformance.oracles import DenseKeys
from specgraph_conformance.rig import expect_equal, on_host
from specgraph_conformance.tiny_models import HEADS, PROGRAMS, STEPPING

LOWERED = [
    *((kind, "merged") for kind in (*HEADS, "ngram") if kind != "eagle"),
    *((kind, "step") for kind in STEPPING),
]
"""(kind, lowering). EAGLE is not among them: it has its own case for every lowering."""


@pytest.mark.parametrize(("kind", "lowering"), LOWERED)
@case(
    "drafting.every-head-equals-eager",
    "Each kind of drafter gives the bits of eager in one graph, and each program of several steps in one graph a step.",
    hazard="acceptance-hidden",
    cause="an op that only this head uses (auxiliary states, a vocabulary map) under capture",
)
def test_heads(platform: Platform, attention: str, lowering: str, kind: str, seed: int) -> None:
    compare(platform, make_config(decode=lowering), attention, seed, kind)


@pytest.mark.parametrize(
    "kind", [*(kind for kind in HEADS if kind != "eagle"), "mtp-two-modules", "dspark-gated", "dspark-rnn"]
)
@case(
    "drafting.every-head-follows-float64",
    "Drafts and KV of each kind of drafter are those of a dense float64 one, from the accepted tokens alone; also of a "
    "head of two modules, the fewest that differ by step, and of each way to draw a block in order.",
    hazard="head-arithmetic",
    cause="rows, positions or slots of this kind: modules over all rows, a block after the accepted ones, an offset",
)
def test_oracle(platform: Platform, attention: str, kind: str, seed: int) -> None:
    k = 2 if kind == "mtp-two-modules" else 4
    follow_oracle(platform, make_config(decode="auto", k=k), attention, seed, [3, 1], kind)


@pytest.mark.parametrize("kind", [kind for kind in PROGRAMS if kind != "eagle3"])
@case(
    "drafting.k-follows-the-batch",
    "With a schedule of K by batch size, each batch drafts the K of the captured size that it is padded to, after "
    "rounds of the former K, as float64 does, and KV stays complete where K is 0.",
    hazard="dynamic-k-negative",
    cause="a graph, a view or a host length that has the largest K instead of the batch's, or K is looked up by the "
    "number of real requests",
)
def test_schedule(platform: Platform, attention: str, kind: str, seed: int) -> None:
    sizes: dict[str, Any] = {"max_num_requests": 5, "capture_sizes": (1, 3, 5), "prefill": "eager"}
    schedule = {1: 5, 2: 4, 4: 3, 5: 0}
    made = rig(platform, make_config(decode="auto", k=5, draft_schedule=schedule, **sizes), attention, kind)
    rows = made.config.query_len
    ks = {1: 5, 2: 3, 5: 0}  # a batch of 2 is padded to 3, and takes the K of the entry for up to 4
    for batch in make_batches(made.config, made.head.aux_size, seed, [5, 1, 2, 1]):
        round_ = _of_rows(away_from_the_end(made.config, batch), rows)
        drafts = expect_oracle(made, round_, float64_head(made, kind))
        k = ks[batch.num_requests]
        assert drafts.token_ids.shape == (batch.num_requests, k)
        assert drafts.dispatch.captured
        rows = k + 1


def _of_rows(batch: HostBatch, rows: int) -> HostBatch:
    """Return the batch for a smaller K: the first rows of each request."""
    aux = batch.aux_hidden.view(batch.num_requests, -1, batch.aux_hidden.shape[1])
    return replace(
        batch,
        sampled_token_ids=batch.sampled_token_ids[:, :rows],
        num_sampled=[min(count, rows) for count in batch.num_sampled],
        aux_hidden=aux[:, :rows].flatten(0, 1),
    )


@pytest.mark.parametrize("kind", PROGRAMS)
@case(
    "drafting.prompts-follow-float64",
    "A prompt prefilled in padded passes leaves the KV of a dense float64 drafter, and writes nothing else.",
    cause="padded rows of a prompt pass that write, rows of its later modules, positions that restart with a pass",
)
def test_prompts(platform: Platform, attention: str, kind: str, seed: int) -> None:
    made = rig(platform, make_config(decode="auto"), attention, kind)
    head, tolerance = float64_head(made, kind), TOLERANCE[made.head.dtype]
    before = made.host_caches()
    (batch,) = make_batches(made.config, head.aux_size, seed, [1])
    prompt, blocks = make_prompt(made, batch.start_positions[0], seed), batch.blocks[0]
    dense = DenseKeys.empty(head.attention_layers)
    whole = [token for _, tokens, _ in prompt for token in tokens]
    for first, tokens, aux in prompt:
        made.prefill(whole, range(first, first + len(tokens)), blocks, aux)
        dense_prompt(head, dense, torch.tensor(whole[first:]), on_host(aux), first, made.config.num_speculative_tokens)
    length, size = batch.start_positions[0], made.config.block_size
    slots = [(blocks[p // size] - 1) * size + p % size for p in range(length)]
    for layer, (now, old) in enumerate(zip(made.host_caches(), before, strict=True)):
        for name, new, kept, wanted in zip(
            ("keys", "values"), now, old, (dense.keys[layer], dense.values[layer]), strict=True
        ):
            new, kept = new.flatten(0, 1), kept.flatten(0, 1)
            written = slots[: wanted.shape[0]]  # none for an unused module
            close = torch.isclose(new[written].double(), wanted, atol=tolerance, rtol=tolerance).flatten(1).all(dim=1)
            assert close.all(), f"{name} of layer {layer} differ at positions {(~close).nonzero().flatten().tolist()}"
            rest = [slot for slot in range(new.shape[0]) if slot not in written]
            expect_equal(new[rest], kept[rest], f"{name} of layer {layer} that are no prompt row's")


@pytest.mark.parametrize("kind", HEADS)
@case(
    "drafting.every-head-samples-repeatably",
    "Sampled drafts of each kind are those of eager, repeat with their seeds, and change with others.",
    hazard="gumbel-seed-position",
    cause="noise of this kind's draft op: of the row or the block instead of seed and position",
)
def test_samples(platform: Platform, kind: str, seed: int) -> None:
    config = make_config(decode="auto", k=5, sampled=True, prefill="eager", capture_sizes=(4,))
    made, eager = rig(platform, config, "paged", kind), rig(platform, replace(config, decode="eager"), "paged", kind)
    (batch,) = make_batches(config, made.head.aux_size, seed, [4])
    hot = replace(batch, temperature=torch.full((4,), 1e6))  # all tokens are equally likely: only the noise decides
    first, wanted = made.propose_to_host(hot), eager.propose_to_host(hot)
    assert first.probs is not None
    assert wanted.probs is not None
    expect_equal(first.token_ids, wanted.token_ids)
    expect_equal(first.probs, wanted.probs)
    expect_equal(made.propose_to_host(hot).token_ids, first.token_ids)
    assert not torch.equal(made.propose_to_host(replace(hot, seeds=hot.seeds + 1)).token_ids, first.token_ids)
    one_seed = made.propose_to_host(replace(hot, seeds=torch.full((4,), 9))).token_ids
    assert len({tuple(row) for row in one_seed.tolist()}) > 1, "other positions, the same noise"
    assert any(len(set(row)) > 1 for row in one_seed.tolist()), "every draft step has the same noise"
