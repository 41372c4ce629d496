"""Drafting: every lowering gives the bits of eager, and eager the drafts of a dense float64 chain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from specgraph.attention import NULL_SLOT
from specgraph.drafting import DraftConfig
from specgraph.errors import CapacityError, CaptureError, ConfigError, StaleInputError
from specgraph.graphs import BatchDescriptor, GraphRunner
from specgraph.platforms import LOWERINGS, Platform
from torch import Tensor

from specgraph_conformance.case import case
from specgraph_conformance.oracles import chain_draft, gather_request
from specgraph_conformance.rig import (
    DraftRig,
    HostBatch,
    Round,
    expect_equal,
    make_batches,
    make_config,
    num_blocks,
    on_host,
)
from specgraph_conformance.tiny_models import HEADS, make_head

CAPTURED = [name for name in LOWERINGS if name != "eager"]
BATCHES = [4, 1, 3, 4, 2]
"""Requests a round: shrinking and growing, at captured sizes and padded to them."""


def rig(platform: Platform, config: DraftConfig, attention: str, kind: str = "eagle", dtype: Any = None) -> DraftRig:
    """A drafter with its head on the platform."""
    head = make_head(kind, 1, platform.device, dtype or torch.float32)
    return DraftRig(platform, head, config, attention)


def run(made: DraftRig, batches: Sequence[HostBatch]) -> tuple[list[Round], list[tuple[Tensor, Tensor]]]:
    """All rounds and the caches after them; the rig is closed."""
    rounds = [made.round(batch) for batch in batches]
    caches = made.host_caches()
    made.close()
    return rounds, caches


def assert_same(ours: tuple[list[Round], Any], eager: tuple[list[Round], Any]) -> None:
    """Same bits: draft tokens, distributions, carried hidden states, and KV caches at the end."""
    for number, (a, b) in enumerate(zip(ours[0], eager[0], strict=True)):
        assert a.token_ids.tolist() == b.token_ids.tolist(), f"draft tokens of round {number}"
        expect_equal(a.hidden, b.hidden, f"hidden states of round {number}")
        if b.probs is not None:
            assert a.probs is not None
            expect_equal(a.probs, b.probs, f"draft distributions of round {number}")
    for layer, (a, b) in enumerate(zip(ours[1], eager[1], strict=True)):
        expect_equal(a[0], b[0], f"keys of layer {layer}")
        expect_equal(a[1], b[1], f"values of layer {layer}")


def compare(
    platform: Platform,
    config: DraftConfig,
    attention: str,
    seed: int,
    kind: str = "eagle",
    dtype: Any = None,
    sizes: Sequence[int] = BATCHES,
) -> None:
    """Run the same rounds in `config.lowering` and in eager, and expect the same bits from graphs."""
    ours = rig(platform, config, attention, kind, dtype)
    batches = make_batches(config, ours.head.aux_size, seed, sizes)
    rounds = run(ours, batches)
    assert all(r.from_graph for r in rounds[0]), "a batch ran without its graph"
    # Keyed without the lowering, so that every lowering is compared with one eager run.
    config = replace(config, lowering="eager")
    assert_same(rounds, eager_rounds(platform, config, attention, seed, kind, dtype or torch.float32, tuple(sizes)))


@lru_cache
def eager_rounds(
    platform: Platform,
    config: DraftConfig,
    attention: str,
    seed: int,
    kind: str,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
) -> tuple[list[Round], list[tuple[Tensor, Tensor]]]:
    """The same rounds in eager: one run for all lowerings."""
    eager = rig(platform, config, attention, kind, dtype)
    return run(eager, make_batches(config, eager.head.aux_size, seed, sizes))


def oracle_rounds(platform: Platform, config: DraftConfig, attention: str, seed: int, sizes: Sequence[int]) -> None:
    """Rounds against the float64 chain, each from the KV that the device had before it."""
    made, reference = (
        rig(platform, config, attention),
        make_head("eagle", 1, torch.device("cpu"), compute=torch.float64),
    )
    compared = 0
    for batch in make_batches(config, made.head.aux_size, seed, sizes):
        before = [(on_host(c.key), on_host(c.value)) for c in made.caches]
        drafts = on_host(made.propose(batch).token_ids)
        after = [(on_host(c.key), on_host(c.value)) for c in made.caches]
        q = config.query_len
        for r in range(batch.num_requests):
            start, count, blocks = batch.start_positions[r], batch.num_sampled[r], batch.blocks[r]
            room = config.max_model_len - start - count + 1  # draft steps with a position of their own
            draft = chain_draft(
                reference,
                batch.sampled_token_ids[r, :count].tolist(),
                batch.aux_hidden[r * q : r * q + count],
                start,
                [gather_request(key, blocks, start) for key, _ in before],
                [gather_request(value, blocks, start) for _, value in before],
                min(config.num_speculative_tokens, max(room, 1)),
                forced=drafts[r].tolist(),
            )
            best = draft.logits.max(dim=-1).values
            taken = draft.logits[torch.arange(len(draft.logits)), drafts[r, : len(draft.logits)]]
            # A token may differ from the oracle's only where the two are as good as tied.
            assert ((best - taken) < 0.02).all(), f"request {r}: drafts {drafts[r].tolist()}, logits fall short by "
            length = min(start + count - 1 + config.num_speculative_tokens, config.max_model_len)
            for (key, value), want_key, want_value in zip(after, draft.keys, draft.values, strict=True):
                stored = gather_request(key, blocks, length), gather_request(value, blocks, length)
                # The last draft token's own row is not run: its key comes with the next round.
                for ours, wanted in zip(stored, (want_key, want_value), strict=True):
                    rows = min(length, wanted.shape[0])
                    torch.testing.assert_close(ours[:rows].double(), wanted[:rows], atol=2e-2, rtol=2e-2)
            compared += 1
    made.close()
    assert compared == sum(sizes)


@pytest.mark.parametrize("k", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("lowering", CAPTURED)
@case(
    "drafting.lowering-equals-eager",
    "A captured lowering gives the draft tokens, hidden states and KV of eager, bit for bit, as batches change.",
    hazard="acceptance-hidden",
    cause="a captured kernel that differs from the eager one, or an input that its replay doesn't see",
)
def test_lowerings(platform: Platform, attention: str, lowering: str, k: int, seed: int) -> None:
    compare(platform, make_config(lowering=lowering, k=k), attention, seed)


@pytest.mark.parametrize("lowering", CAPTURED)
@pytest.mark.parametrize("kind", [kind for kind in HEADS if kind != "eagle"])
@case(
    "drafting.every-head-equals-eager",
    "Each kind of drafter gives the same bits in every lowering.",
    hazard="acceptance-hidden",
    cause="an op that only this head uses (auxiliary states, a vocabulary map) under capture",
)
def test_heads(platform: Platform, attention: str, lowering: str, kind: str, seed: int) -> None:
    compare(platform, make_config(lowering=lowering), attention, seed, kind)


@pytest.mark.parametrize("lowering", CAPTURED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@case(
    "drafting.half-precision-equals-eager",
    "In half precision a captured lowering gives the bits of eager.",
    hazard="acceptance-hidden",
    cause="a matmul that chooses another algorithm or workspace under capture",
)
def test_half(platform: Platform, attention: str, lowering: str, dtype: torch.dtype, seed: int) -> None:
    compare(platform, make_config(lowering=lowering), attention, seed, dtype=dtype)


@pytest.mark.parametrize("lowering", LOWERINGS)
@case(
    "drafting.follows-the-chain",
    "Drafts and KV are those of a dense float64 chain over the accepted tokens, at every length and block order.",
    hazard="metadata-not-rebuilt-between-steps",
    cause="positions, lengths or slots that are not moved on from draft step to draft step",
)
def test_chain(platform: Platform, attention: str, lowering: str, seed: int) -> None:
    oracle_rounds(platform, make_config(lowering=lowering, k=4), attention, seed, [3, 4, 1])


@case(
    "drafting.quick-check",
    "The platform's default lowering gives the bits of eager.",
    hazard="acceptance-hidden",
    cause="run the other drafting cases: each looks at one thing",
    quick=True,
)
def test_quick(platform: Platform, seed: int) -> None:
    compare(platform, make_config(lowering="auto"), "paged", seed, sizes=[3, 4, 1])


@pytest.mark.parametrize("lowering", CAPTURED)
@case(
    "drafting.k-equals-two",
    "With two draft tokens, sizes, columns and rows are right.",
    hazard="k-equals-2",
    cause="sizes or columns that assume at least two later steps",
)
def test_k2(platform: Platform, lowering: str, seed: int) -> None:
    compare(platform, make_config(lowering=lowering, k=2), "paged", seed)
    oracle_rounds(platform, make_config(lowering=lowering, k=2), "paged", seed, [4, 1])


@pytest.mark.parametrize("lowering", CAPTURED)
@case(
    "drafting.blocks-may-move",
    "The same requests, handed over again with other KV blocks, draft the same tokens.",
    hazard="stale-metadata-copied-late",
    cause="the block table is copied after the replay, or the slots are computed from an old one",
)
def test_blocks(platform: Platform, lowering: str, seed: int) -> None:
    config = make_config(lowering=lowering)
    made = rig(platform, config, "paged")
    (batch,) = make_batches(config, made.head.aux_size, seed, [4])
    first = made.round(batch)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(2):
        order = (torch.randperm(num_blocks(config) - 1, generator=generator) + 1).tolist()
        moved = [[order.pop() for _ in row] for row in batch.blocks]
        for cache in made.caches:
            for tensor in cache:
                old = tensor.clone()
                for before, after in zip(batch.blocks, moved, strict=True):
                    tensor[after] = old[before]
        batch = HostBatch(**{name: getattr(batch, name) for name in HostBatch.__slots__} | {"blocks": moved})
        again = made.round(batch)
        assert again.token_ids.tolist() == first.token_ids.tolist()
        expect_equal(again.hidden, first.hidden)
    made.close()


@pytest.mark.parametrize("lowering", CAPTURED)
@case(
    "drafting.every-input-is-seen",
    "Changing one input of a round (tokens, accepted counts, positions, hidden states, blocks) changes what eager "
    "changes, and nothing else.",
    hazard="stale-metadata-rebound",
    cause="a buffer is reassigned instead of written in place: the graph reads the old address",
)
def test_inputs(platform: Platform, lowering: str, seed: int) -> None:
    config, eager = make_config(lowering=lowering), make_config()
    head = make_head("eagle", 1, platform.device)
    (a, b) = make_batches(config, head.aux_size, seed, [4, 4])
    same_place = {"start_positions": a.start_positions, "blocks": a.blocks}
    batches = [a]
    for name in ("sampled_token_ids", "num_sampled", "aux_hidden"):
        batches.append(HostBatch(**{n: getattr(a, n) for n in HostBatch.__slots__} | {name: getattr(b, name)}))
    batches += [HostBatch(**{n: getattr(b, n) for n in HostBatch.__slots__} | same_place), b]
    assert_same(run(rig(platform, config, "paged"), batches), run(rig(platform, eager, "paged"), batches))


@pytest.mark.parametrize("lowering", CAPTURED)
@case(
    "drafting.attention-is-captured",
    "The KV written in earlier rounds moves the drafts of a captured lowering.",
    hazard="metadata-none-at-capture",
    cause="the graph was captured without attention metadata, so attention was left out",
)
def test_attends(platform: Platform, lowering: str, seed: int) -> None:
    config = make_config(lowering=lowering)
    made = rig(platform, config, "paged")
    (batch,) = make_batches(config, made.head.aux_size, seed, [4])
    first = made.round(batch)
    for cache in made.caches:
        cache.value.mul_(-2)
    assert not torch.equal(made.round(batch).hidden, first.hidden)
    made.close()


@pytest.mark.parametrize("lowering", LOWERINGS)
@case(
    "drafting.padded-rows-write-nothing",
    "A padded batch writes KV only where its requests' drafts stand: every other slot keeps its bits.",
    hazard="padded-rows-write-kv",
    cause="padded rows run with a slot of a real block instead of -1",
)
def test_padding_writes(platform: Platform, attention: str, lowering: str, seed: int) -> None:
    config = make_config(lowering=lowering, capture_sizes=(4,))
    made = rig(platform, config, attention)
    full, small = make_batches(config, made.head.aux_size, seed, [4, 1])
    made.round(full)
    before = made.host_caches()
    made.round(small)
    q, k, block = config.query_len, config.num_speculative_tokens, config.block_size
    allowed: set[int] = set()
    for start, count, blocks in zip(small.start_positions, small.num_sampled, small.blocks, strict=True):
        for position in range(start, min(start + max(q, count + k), config.max_model_len)):
            allowed.add((blocks[position // block] - 1) * block + position % block)
    for (key, value), (old_key, old_value) in zip(made.host_caches(), before, strict=True):
        for new, old in ((key, old_key), (value, old_value)):
            changed = (new != old).flatten(2).any(dim=-1).flatten().nonzero().flatten().tolist()
            assert set(changed) <= allowed, f"slots {sorted(set(changed) - allowed)} were written"
    made.close()


@pytest.mark.parametrize("lowering", LOWERINGS)
@case(
    "drafting.smaller-batch-after-larger",
    "After a larger batch, a smaller one drafts what it drafts alone, and the rows after it are inert.",
    hazard="stale-padding-rows",
    cause="the tail of the buffers keeps the last, larger batch",
)
def test_shrinking(platform: Platform, lowering: str, seed: int) -> None:
    config = make_config(lowering=lowering, capture_sizes=(4,))
    made, alone = rig(platform, config, "paged"), rig(platform, config, "paged")
    full, small = make_batches(config, made.head.aux_size, seed, [4, 2])
    (expected,) = [alone.round(small)]
    made.round(full)
    for mine, other in zip(made.caches, alone.caches, strict=True):
        for tensor, fresh in zip(mine, other, strict=True):
            tensor[small.blocks[0]] = fresh[small.blocks[0]]
            tensor[small.blocks[1]] = fresh[small.blocks[1]]
    before = made.host_caches()
    ours = made.round(small)
    assert ours.token_ids.tolist() == expected.token_ids.tolist()
    assert on_host(made.drafter.buffers.num_sampled).tolist()[2:] == [0, 0]
    assert on_host(made.drafter.buffers.first.slot_mapping)[2 * config.query_len :].unique().tolist() == [NULL_SLOT]
    mine = {block - 1 for row in small.blocks for block in row}
    others = [block for block in range(num_blocks(config) - 1) if block not in mine]
    for (key, value), (old_key, old_value) in zip(made.host_caches(), before, strict=True):
        expect_equal(key[others], old_key[others])
        expect_equal(value[others], old_value[others])
    made.close()
    alone.close()


@pytest.mark.parametrize("lowering", LOWERINGS)
@case(
    "drafting.each-step-writes-its-kv",
    "Each draft step's key and value stand in the cache after the propose.",
    hazard="chain-without-slots",
    cause="the chain is captured without slots for the later steps",
)
def test_chain_writes(platform: Platform, attention: str, lowering: str, seed: int) -> None:
    config = make_config(lowering=lowering, k=4)
    made = rig(platform, config, attention)
    (batch,) = make_batches(config, made.head.aux_size, seed, [1])
    batch = HostBatch(**{n: getattr(batch, n) for n in HostBatch.__slots__} | {"num_sampled": [config.query_len]})
    before = made.host_caches()
    made.round(batch)
    start, block = batch.start_positions[0] + config.query_len, config.block_size
    for step in range(config.num_speculative_tokens - 1):
        position = start + step
        index, offset = batch.blocks[0][position // block] - 1, position % block
        for (key, value), (old_key, old_value) in zip(made.host_caches(), before, strict=True):
            assert not torch.equal(key[index, offset], old_key[index, offset]), f"no key of draft step {step + 1}"
            assert not torch.equal(value[index, offset], old_value[index, offset]), f"no value of step {step + 1}"
    made.close()


@pytest.mark.parametrize("lowering", LOWERINGS)
@case(
    "drafting.results-belong-to-the-caller",
    "The drafts and distributions of a round don't change with the next one.",
    hazard="output-aliases-graph-buffer",
    cause="propose hands out the graph's own buffer instead of a copy",
    quick=True,
)
def test_results(platform: Platform, lowering: str, seed: int) -> None:
    made = rig(platform, make_config(lowering=lowering, sampled=True), "paged")
    batches = make_batches(made.config, made.head.aux_size, seed, [4, 4])
    first = made.propose(batches[0])
    assert first.probs is not None
    kept, kept_probs = on_host(first.token_ids), on_host(first.probs)
    made.propose(batches[1])
    platform.synchronize()
    expect_equal(on_host(first.token_ids), kept)
    expect_equal(on_host(first.probs), kept_probs)
    made.close()


@pytest.mark.parametrize("lowering", LOWERINGS)
@case(
    "drafting.up-to-the-last-position",
    "Drafts that pass the end of max_model_len write nothing there and stay within the rotary table.",
    hazard="max-len-clamp",
    cause="later draft steps move positions or slots past max_model_len",
)
def test_max_len(platform: Platform, attention: str, lowering: str, seed: int) -> None:
    config = make_config(lowering=lowering, k=5, max_model_len=32, max_num_requests=2)
    made = rig(platform, config, attention)
    batches = make_batches(config, made.head.aux_size, seed, [2])
    fields = {n: getattr(batches[0], n) for n in HostBatch.__slots__}
    for start, count in ((26, 6), (29, 3), (30, 2), (31, 1)):
        blocks = [[1, 2], [3, 4]]
        batch = HostBatch(**fields | {"start_positions": [start] * 2, "num_sampled": [count, 1], "blocks": blocks})
        before = made.host_caches()
        made.round(batch)
        positions = on_host(made.drafter.buffers.step.positions)
        assert positions.max() < config.max_model_len
        assert positions.min() >= 0
        for (key, _), (old, _) in zip(made.host_caches(), before, strict=True):
            expect_equal(key[4:], old[4:], "a block of no request")
            expect_equal(key[1, : start % 16], old[1, : start % 16], "a position before the rows")
            expect_equal(key[0], old[0])
    made.close()


class RowCount:
    """A head that notes how many rows each pass has. Wraps another."""

    def __init__(self, head: Any) -> None:
        self.head = head
        self.rows: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.head, name)

    def forward(self, token_ids: Tensor, *args: Any) -> Any:
        """Count and pass on."""
        self.rows.append(token_ids.shape[0])
        return self.head.forward(token_ids, *args)


@pytest.mark.parametrize("lowering", LOWERINGS)
@case(
    "drafting.later-steps-have-one-row-a-request",
    "Step 0 runs K + 1 rows a request, and each later step one.",
    hazard="step-ladder-overpadding",
    cause="later steps are captured with the size ladder of step 0",
)
def test_rows(platform: Platform, lowering: str, seed: int) -> None:
    head = RowCount(make_head("eagle", 1, platform.device))
    config = make_config(lowering=lowering, k=3, max_num_requests=5, capture_sizes=(2, 5))
    made = DraftRig(platform, head, config)
    for batch in make_batches(config, head.aux_size, seed, [2, 5]):
        made.round(batch)
    q = config.query_len
    # Prompts are captured too, at sizes of their own.
    assert set(head.rows) >= {2 * q, 2, 5 * q, 5}
    assert head.rows.count(2) >= head.rows.count(2 * q)
    made.close()


@pytest.mark.parametrize("lowering", CAPTURED)
@case(
    "drafting.named-sizes-are-captured",
    "Each size that the user names is captured as named, with K + 1 rows a request, and no other.",
    hazard="size-truncated",
    cause="sizes are rounded or cut to a multiple without a word",
)
def test_sizes(platform: Platform, lowering: str) -> None:
    sizes = (1, 3, 5, 7)
    made = rig(platform, make_config(lowering=lowering, max_num_requests=7, capture_sizes=sizes), "paged")
    assert made.drafter.runner is not None
    seen = made.drafter.runner.descriptors
    assert sorted({d.num_requests for d in seen}) == list(sizes)
    made.close()


@pytest.mark.parametrize("k", [1, 2, 3, 5, 7])
@case(
    "drafting.rows-are-aligned",
    "A captured size's rows are its requests times the rows of one, never rounded on their own.",
    hazard="block-misaligned-sizes",
    cause="row counts are rounded to a multiple of something else than K + 1",
    quick=True,
)
def test_alignment(platform: Platform, k: int) -> None:
    made = rig(platform, make_config(lowering="auto", k=k), "paged")
    assert made.drafter.runner is not None
    for descriptor in made.drafter.runner.descriptors:
        rows = 1 if descriptor.phase == "step" else k + 1
        assert descriptor.num_tokens == descriptor.num_requests * rows
    for n in range(1, made.config.max_num_requests + 1):
        assert made.drafter.dispatch(n).descriptor.num_tokens % (k + 1) == 0
    made.close()


@pytest.mark.parametrize("lowering", LOWERINGS)
@case(
    "drafting.largest-batch-fits",
    "The largest batch drafts what the float64 chain drafts: every buffer holds the padded maximum.",
    hazard="buffer-smaller-than-padded-size",
    cause="a buffer is allocated for the asked maximum and sliced at the padded one",
)
def test_largest(platform: Platform, lowering: str, seed: int) -> None:
    config = make_config(lowering=lowering, max_num_requests=5, capture_sizes=(2, 5))
    oracle_rounds(platform, config, "paged", seed, [5, 3])


@pytest.mark.parametrize("lowering", CAPTURED)
@case(
    "drafting.every-batch-has-its-graph",
    "After capture(), each batch up to the maximum is served by a graph captured then.",
    hazard="capture-key-mismatch",
    cause="capture and dispatch build the key of a graph in two places",
)
def test_keys(platform: Platform, lowering: str, seed: int) -> None:
    made = rig(platform, make_config(lowering=lowering), "paged")
    runner = made.drafter.runner
    assert runner is not None
    before = list(runner.descriptors)
    for batch in make_batches(made.config, made.head.aux_size, seed, [1, 2, 3, 4]):
        launched = runner.launches
        assert made.round(batch).from_graph
        assert runner.launches > launched
    assert runner.descriptors == before
    made.close()


@pytest.mark.parametrize("lowering", CAPTURED)
@case(
    "drafting.nothing-is-captured-at-request-time",
    "A propose never captures: without capture() it is a CaptureError that names what is missing.",
    hazard="capture-at-request-time",
    cause="the runner captures what it lacks when a request comes",
)
def test_request_time(platform: Platform, lowering: str, seed: int) -> None:
    made = rig(platform, make_config(lowering=lowering), "paged")
    assert made.drafter.runner is not None
    assert made.drafter.runner.graph_count > 0
    (batch,) = make_batches(made.config, made.head.aux_size, seed, [2])
    made.close()
    with pytest.raises(CaptureError):
        made.propose(batch)
    assert made.drafter.runner.graph_count == 0


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
    runner.capture(BatchDescriptor("step", 4, 1, 3), lambda recording: x.add_(1))
    with pytest.raises(CaptureError):
        runner.replay(BatchDescriptor("step", 4, 1, 2))
    runner.capture(BatchDescriptor("step", 4, 1, 2), lambda recording: x.add_(100))
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
    from dataclasses import replace

    limited = replace(platform.capabilities, max_live_graphs=2)
    monkeypatch.setattr(type(platform), "capabilities", property(lambda self: limited))
    x = torch.zeros(4, device=platform.device)
    runner = GraphRunner(platform, lambda: {"x": x})
    for n in (1, 2):
        runner.capture(BatchDescriptor("step", n, 1, 3), lambda recording: x.add_(1))
    with pytest.raises(CaptureError):
        runner.capture(BatchDescriptor("step", 3, 1, 3), lambda recording: x.add_(1))
    runner.close()


@pytest.mark.parametrize("lowering", CAPTURED)
@case(
    "drafting.moved-weights-are-noticed",
    "With check_inputs, a replay after the weights were replaced by other tensors is a StaleInputError.",
    hazard="weights-moved",
    cause="addresses aren't compared with those of the capture",
)
def test_weights(platform: Platform, lowering: str, seed: int) -> None:
    made = rig(platform, make_config(lowering=lowering, check_inputs=True), "paged")
    (batch,) = make_batches(made.config, made.head.aux_size, seed, [2])
    made.round(batch)
    head: Any = made.head
    kept = head.layers[0]
    moved = type(kept)(**{n: None if (t := getattr(kept, n)) is None else t.clone() for n in type(kept).__slots__})
    head.layers = (moved,)
    with pytest.raises(StaleInputError):
        made.propose(batch)
    made.close()


@pytest.mark.parametrize("lowering", LOWERINGS)
@case(
    "drafting.each-token-has-its-column",
    "Draft token k is in column k, and its distribution in row k, in every lowering.",
    hazard="draft-step-column",
    cause="the column is chosen by the host at capture, or written into a copy",
)
def test_columns(platform: Platform, lowering: str, seed: int) -> None:
    made = rig(platform, make_config(lowering=lowering, k=5, sampled=True), "paged")
    (batch,) = make_batches(made.config, made.head.aux_size, seed, [4])
    cold = HostBatch(**{n: getattr(batch, n) for n in HostBatch.__slots__} | {"temperature": torch.zeros(4)})
    made.drafter.buffers.draft_token_ids.fill_(-7)
    drafts = made.round(cold)
    assert drafts.probs is not None
    expect_equal(drafts.probs.argmax(dim=-1), drafts.token_ids, "the most likely token")
    expect_equal(drafts.probs.sum(dim=-1), torch.ones(4, 5))
    made.close()


@pytest.mark.parametrize("lowering", CAPTURED)
@case(
    "drafting.sampled-equals-eager",
    "Sampled drafts and their distributions are those of eager, bit for bit.",
    hazard="gumbel-seed-position",
    cause="noise that depends on the graph, the padding or the draft step instead of seed and position",
)
def test_sampled(platform: Platform, attention: str, lowering: str, seed: int) -> None:
    compare(platform, make_config(lowering=lowering, sampled=True), attention, seed)


@pytest.mark.parametrize("lowering", LOWERINGS)
@case(
    "drafting.sampled-repeats",
    "A sampled round repeats with its seeds, at any padding, and changes with other seeds or positions.",
    hazard="gumbel-seed-position",
    cause="noise that is not a function of seed and position alone",
)
def test_repeats(platform: Platform, lowering: str, seed: int) -> None:
    config = make_config(lowering=lowering, k=5, sampled=True)
    made = rig(platform, config, "paged", kind="eagle3")
    (batch,) = make_batches(config, made.head.aux_size, seed, [4])
    fields = {n: getattr(batch, n) for n in HostBatch.__slots__} | {"temperature": torch.full((4,), 5.0)}
    hot = HostBatch(**fields)
    first = made.round(hot).token_ids
    expect_equal(made.round(hot).token_ids, first)
    assert not torch.equal(made.round(HostBatch(**fields | {"seeds": batch.seeds + 1})).token_ids, first)
    uniform = torch.full((4,), 1e6)  # every token equally likely: only the noise decides
    flat = HostBatch(**fields | {"temperature": uniform, "seeds": torch.full((4,), 9)})
    draws = made.round(flat).token_ids
    assert len({tuple(row) for row in draws.tolist()}) > 1, "other positions, the same noise"
    assert any(len(set(row)) > 1 for row in draws.tolist()), "every draft step has the same noise"
    made.close()


@pytest.mark.parametrize("numbers", ["host", "device"])
@pytest.mark.parametrize("lowering", LOWERINGS)
@case(
    "drafting.rejected-tokens-are-not-attended",
    "What rejected rows left behind moves no draft: lengths count this round's accepted tokens only.",
    hazard="rejected-tokens-in-lengths",
    cause="host lengths are computed before the accepted counts are known",
)
def test_rejected(platform: Platform, attention: str, lowering: str, numbers: str, seed: int) -> None:
    config = make_config(lowering=lowering, k=4, capture_sizes=(4,))
    made, other = rig(platform, config, attention), rig(platform, config, attention)
    (batch,) = make_batches(config, made.head.aux_size, seed, [3])
    fields = {n: getattr(batch, n) for n in HostBatch.__slots__} | {"num_sampled": [1, 2, 1]}
    aux = batch.aux_hidden.clone().view(3, config.query_len, -1)
    for r, count in enumerate((1, 2, 1)):
        aux[r, count:] *= -9
    a = made.round(HostBatch(**fields), host_numbers=numbers == "host")
    b = other.round(HostBatch(**fields | {"aux_hidden": aux.flatten(0, 1)}), host_numbers=numbers == "host")
    expect_equal(a.token_ids, b.token_ids)
    expect_equal(a.hidden, b.hidden)
    made.close()
    other.close()


@pytest.mark.parametrize("lowering", LOWERINGS)
@case(
    "drafting.each-step-sees-one-more-token",
    "Each draft step attends to the one before it: drafts follow the float64 chain over seven steps.",
    hazard="per-step-lengths-not-updated",
    cause="every step got step 0's or step 1's lengths",
)
def test_each_step(platform: Platform, attention: str, lowering: str, seed: int) -> None:
    oracle_rounds(platform, make_config(lowering=lowering, k=7, max_num_requests=2), attention, seed, [2, 1])


@pytest.mark.parametrize("lowering", CAPTURED)
@case(
    "drafting.two-drafters-on-one-platform",
    "Two drafters of one size, run in turn, don't disturb each other.",
    hazard="update-prefill-decode-mixed",
    cause="graphs, updates or pools are kept by size in a table that both share",
)
def test_two(platform: Platform, attention: str, lowering: str, seed: int) -> None:
    config = make_config(lowering=lowering, capture_sizes=(2, 4))
    one, other = rig(platform, config, attention), rig(platform, config, attention, kind="eagle3")
    alone = rig(platform, config, attention)
    batches = make_batches(config, one.head.aux_size, seed, [4, 2, 3])
    theirs = make_batches(config, other.head.aux_size, seed + 1, [3, 4, 1])
    interleaved: list[Round] = []
    for mine, their in zip(batches, theirs, strict=True):
        interleaved.append(one.round(mine))
        other.round(their)
    result = interleaved, one.host_caches()
    one.close()
    other.close()
    assert_same(result, run(alone, batches))


@pytest.mark.parametrize("lowering", CAPTURED)
@case(
    "drafting.a-hundred-rounds-without-growth",
    "A hundred rounds of changing batches take no memory.",
    cause="a propose that allocates and keeps: graphs, events or tensors of each round",
    timeout=120,
)
def test_growth(platform: Platform, lowering: str, seed: int) -> None:
    made = rig(platform, make_config(lowering=lowering), "paged")
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
    made.close()


@case(
    "drafting.merged-is-one-launch",
    "The merged lowering replays one graph a propose, whatever K.",
    cause="the loop is split over several graphs",
    needs=("merged_loop",),
    quick=True,
)
def test_one_launch(platform: Platform, seed: int) -> None:
    for k in (1, 5):
        made = rig(platform, make_config(lowering="merged", k=k), "paged")
        assert made.drafter.runner is not None
        before = made.drafter.runner.launches
        made.round(make_batches(made.config, made.head.aux_size, seed, [3])[0])
        assert made.drafter.runner.launches == before + 1
        made.close()


@case(
    "drafting.wrong-shapes-refused",
    "A batch of wrong shapes, or too many requests, is one error of specgraph before any device work.",
    cause="shapes aren't checked before the buffers are written",
    quick=True,
)
def test_wrong_shapes(platform: Platform, seed: int) -> None:
    made = rig(platform, make_config(lowering="auto"), "paged")
    (batch,) = make_batches(made.config, made.head.aux_size, seed, [2])
    fields = {n: getattr(batch, n) for n in HostBatch.__slots__}
    with pytest.raises(ConfigError):
        made.propose(HostBatch(**fields | {"aux_hidden": batch.aux_hidden[:-1]}))
    with pytest.raises(ConfigError):
        made.propose(HostBatch(**fields | {"sampled_token_ids": batch.sampled_token_ids[:, :-1]}))
    larger = make_config(k=made.config.num_speculative_tokens, max_num_requests=5)
    with pytest.raises(CapacityError):
        made.propose(make_batches(larger, made.head.aux_size, seed, [5])[0])
    expected = made.round(batch)
    expect_equal(made.round(batch).token_ids, expected.token_ids)
    made.close()
