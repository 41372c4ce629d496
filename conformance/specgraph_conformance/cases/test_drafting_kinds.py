"""Each kind of drafter: same bits as eager, same drafts as float64, prompts in every graph mode, K by batch size, and
sampling."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import combinations
from typing import Any, cast

import pytest
import torch
from specgraph.attention import AttentionMetadata
from specgraph.device import Platform
from specgraph.draft.buffers import PromptRows
from specgraph_models.dspark import DSparkHead
from torch import Tensor

from specgraph_conformance.case import case
from specgraph_conformance.draft_comparison import (
    TOLERANCE,
    Rounds,
    assert_same,
    away_from_the_end,
    compare,
    expect_oracle,
    float64_head,
    follow_oracle,
    rig,
    run,
)
from specgraph_conformance.draft_oracles import block_rows, dense_confidence, dense_prompt
from specgraph_conformance.draft_rig import GRAPH_MODES, DraftRig, HostBatch, make_batches, make_config
from specgraph_conformance.oracles import DenseKeys
from specgraph_conformance.rig import expect_close, expect_equal, on_host
from specgraph_conformance.tiny_models import HEADS, PROGRAMS, STEPPING, VOCAB

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


@case(
    "drafting.confidence-follows-float64",
    "The confidence of each draft token is that of a dense float64 drafter, from its own request's rows and the tokens "
    "before it.",
    hazard="confidence-of-a-neighbour",
    cause="a confidence of another request or row, or one that knows the token it is of",
)
def test_confidence(platform: Platform, attention: str, seed: int) -> None:
    made = rig(platform, make_config(decode="auto", k=4), attention, "dspark")
    head = cast(DSparkHead, float64_head(made, "dspark"))
    for batch in make_batches(made.config, made.head.aux_size, seed, [3, 1]):
        batch = away_from_the_end(made.config, batch)
        before = made.host_caches()
        drafts = made.propose(batch)
        assert drafts.confidence is not None
        q, size = batch.sampled_token_ids.shape[1], made.config.block_size
        for r, blocks in enumerate(batch.blocks):
            start, count = batch.start_positions[r], batch.num_sampled[r]
            slots = [(blocks[p // size] - 1) * size + p % size for p in range(start)]
            keys, values = ([pair[i].flatten(0, 1)[slots] for pair in before] for i in (0, 1))
            tokens, drafted = batch.sampled_token_ids[r, :count], on_host(drafts.token_ids[r])
            aux = batch.aux_hidden[r * q : r * q + count].to(made.head.dtype)
            rows = block_rows(head, tokens, aux, start, keys, values, len(drafted))
            wanted = dense_confidence(head, rows, [int(tokens[-1]), *drafted[:-1].tolist()])
            expect_close(on_host(drafts.confidence[r]).double(), wanted, TOLERANCE[made.head.dtype], f"request {r}")


@case(
    "drafting.norm-output-follows-float64",
    "A head whose steps pass on hidden states after its final norm (EAGLE 3.1) drafts as a dense float64 one.",
    hazard="carry-before-the-norm",
    cause="the next step takes the hidden states before the norm, where one op ends a step and begins the next",
)
def test_norm_output(platform: Platform, attention: str, seed: int) -> None:
    follow_oracle(platform, make_config(decode="auto", k=4), attention, seed, [3, 1], "eagle3-norm-output")


@case(
    "drafting.draft-model-reads-all-keys",
    "Every draft token of a draft model follows from all tokens before it, as in float64, where the context decides.",
    hazard="draft-length-without-offset",
    cause="lengths of later steps that leave out the row itself: a draft model's rows are one position further",
)
def test_context(platform: Platform, attention: str, seed: int) -> None:
    follow_oracle(platform, make_config(decode="auto", k=4), attention, seed, [3, 1, 2], "draft-model-of-context")


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


@pytest.mark.parametrize("kind", ["eagle", "mtp-modules"])
@case(
    "drafting.ragged-prompts-follow-float64",
    "A prompt prefilled with an engine's own metadata, all rows real, leaves the keys of a dense float64 drafter.",
    hazard="prompt-padding",
    cause="later modules that take the tokens of padded passes where every row is real",
)
def test_ragged(platform: Platform, kind: str, seed: int) -> None:
    made = rig(platform, make_config(), "paged", kind)
    head, tolerance = float64_head(made, kind), TOLERANCE[made.head.dtype]
    (batch,) = make_batches(made.config, head.aux_size, seed, [1])
    ((_, tokens, aux), *_), blocks, size = make_prompt(made, 16, seed), batch.blocks[0], made.config.block_size
    n, device = len(tokens), platform.device
    slots = [blocks[p // size] * size + p % size for p in range(n)]
    metadata = AttentionMetadata(
        seq_lens=torch.tensor([n], dtype=torch.int32, device=device),
        query_start_loc=torch.tensor([0, n], dtype=torch.int32, device=device),
        block_table=torch.tensor([blocks], dtype=torch.int32, device=device),
        slot_mapping=torch.tensor(slots, device=device),
        positions=torch.arange(n, device=device),
        query_len=n,
    )
    rows = PromptRows(torch.tensor(tokens, device=device), aux, metadata)
    with torch.no_grad():
        made.drafter.program.prefill(rows, made.drafter.stack.attend_in(None, "eager", {}))
    dense = DenseKeys.empty(head.attention_layers)
    dense_prompt(head, dense, torch.tensor(tokens), on_host(aux), 0, made.config.num_speculative_tokens)
    for layer, (key, _) in enumerate(made.host_caches()):
        wanted = dense.keys[layer]
        stored = key.flatten(0, 1)[[slot - size for slot in slots]][: wanted.shape[0]]
        expect_close(stored, wanted, tolerance, f"keys of layer {layer}")


@pytest.mark.parametrize("mode", GRAPH_MODES)
@case(
    "drafting.graph-modes",
    "In each graph mode prompts and rounds of several modules, which have most graphs, leave the bits of eager, from "
    "the graphs that the mode names and no others.",
    hazard="acceptance-hidden",
    cause="a prompt pass that differs under capture, or a mode that captures what it says runs eagerly",
)
def test_modes(platform: Platform, attention: str, mode: str, seed: int) -> None:
    made = rig(platform, make_config(**GRAPH_MODES[mode]), attention, kind := "mtp-modules")
    decode, prefill = made.drafter.resolution.decode, made.drafter.resolution.prefill
    for option, asked in GRAPH_MODES[mode].items():
        assert asked in ("auto", {"decode": decode, "prefill": prefill}[option])
    graphs = made.drafter.graphs
    phases = set() if graphs is None else {descriptor.phase for descriptor in graphs.descriptors}
    assert bool(phases - {"prefill"}) == (decode != "eager")
    assert ("prefill" in phases) == (prefill != "eager")
    ours = prompt_and_round(made, seed)
    for phase, how in (("propose", decode), ("prefill", prefill)):
        assert (made.drafter.launches[phase] > 0) == (how != "eager"), f"{phase} passes should be {how}"
    assert_same(ours, _eager_prompt_and_round(platform, attention, kind, seed))


@lru_cache
def _eager_prompt_and_round(platform: Platform, attention: str, kind: str, seed: int) -> Rounds:
    return prompt_and_round(rig(platform, make_config(decode="eager"), attention, kind), seed)


def prompt_and_round(made: DraftRig, seed: int) -> Rounds:
    """Prefill the first of three requests, propose for all, and close the rig."""
    (batch,) = make_batches(made.config, made.head.aux_size, seed, [3])
    prompt = make_prompt(made, batch.start_positions[0], seed)
    whole = [token for _, tokens, _ in prompt for token in tokens]
    for first, tokens, aux in prompt:
        made.prefill(whole, range(first, first + len(tokens)), batch.blocks[0], aux)
    return run(made, [batch])


def make_prompt(made: DraftRig, length: int, seed: int) -> list[tuple[int, list[int], Tensor]]:
    """Return the prefill passes of a prompt: the first position, tokens and hidden states of each. All have the largest
    size, except the last one."""
    generator, most = torch.Generator().manual_seed(seed), made.config.prefill_rows[-1]
    tokens = torch.randint(0, VOCAB, (length,), generator=generator).tolist()
    aux = torch.randn(length, made.head.aux_size, generator=generator).to(made.platform.device, made.head.dtype)
    return [(first, tokens[first : first + most], aux[first : first + most]) for first in range(0, length, most)]


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


@pytest.mark.parametrize("kind", PROGRAMS)
@case(
    "drafting.drafted-again-with-new-noise",
    "A position that is drafted again after a rejection has other noise: it is a function of seed, length of the text "
    "and position, whatever was accepted and whatever the other requests are.",
    hazard="drafts-of-one-noise",
    cause="seeds of the draft op that leave out the text's length, have that of the capture or of another request, or "
    "are a sum in which the next seed at a shorter text is the same",
)
def test_again(platform: Platform, kind: str, seed: int) -> None:
    config = make_config(
        decode="auto", k=5, sampled=True, prefill="eager", max_num_requests=3, capture_sizes=(3,), max_model_len=48
    )
    made = rig(platform, config, "paged", kind)
    (batch,) = make_batches(made.config, made.head.aux_size, seed, [3])
    seeds, blocks = [seed + 7, seed + 8, seed + 9], [[3 * r + 1, 3 * r + 2, 3 * r + 3] for r in range(3)]
    hot = torch.full((3,), 1e7)  # all tokens are equally likely: only the noise decides
    batch = replace(batch, temperature=hot, seeds=torch.tensor(seeds), blocks=blocks)
    seen: dict[tuple[int, int], list[int]] = {}
    for starts, counts in (([5, 5, 5], [1, 1, 1]), ([6, 5, 5], [1, 1, 2]), ([5, 6, 6], [2, 1, 1])):
        drafts = made.propose_to_host(replace(batch, start_positions=starts, num_sampled=counts)).token_ids.tolist()
        for r, tokens in enumerate(drafts):
            before = seen.setdefault((starts[r] + counts[r], seeds[r]), tokens)
            assert tokens == before, f"request {r} follows the same text of {starts[r] + counts[r]} tokens"
    for ((short, a), one), ((long, b), other) in combinations(sorted(seen.items()), 2):
        common = one[long - short :], other[: len(other) - long + short]
        assert common[0] != common[1], (
            f"seed {a} behind {short} tokens and seed {b} behind {long} draft {common[0]} at the same positions"
        )
