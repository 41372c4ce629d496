"""Proposes compared with the same proposes in eager, and with a dense float64 drafter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType

import torch
from specgraph.device import LOWERINGS, Platform
from specgraph.draft import DraftConfig, DraftTokens
from torch import Tensor

from specgraph_conformance.draft_oracles import dense_draft
from specgraph_conformance.draft_rig import DraftRig, HostBatch, HostDrafts, fit_attention, make_batches, with_blocks
from specgraph_conformance.oracles import gather_request
from specgraph_conformance.rig import expect_close, expect_equal, on_host
from specgraph_conformance.tiny_models import CONFIG, Head, make_head

TOLERANCE = {torch.float32: 0.02, torch.bfloat16: 0.2}
"""The tolerance of keys, values and logits against float64 with the same weights, by the model's dtype. Over a chain of
five draft steps the tiny models' rounding reaches 0.12 in bfloat16 (8e-6 in float32). A wrong row differs by more than
1."""
CAPTURED = [name for name in LOWERINGS if name != "eager"]
BATCHES = (9, 1, 3, 9, 2)
"""The requests of each batch. They shrink and grow, and some sizes are captured while others are padded."""

Rounds = tuple[list[HostDrafts], list[tuple[Tensor, Tensor]]]
"""The results of each propose, and the KV caches after the last one."""


def rig(
    platform: Platform,
    config: DraftConfig,
    attention: str,
    kind: str = "eagle",
    dtype: torch.dtype = torch.float32,
    *,
    bound: bool = False,
) -> DraftRig:
    """Make a drafter with its head on the platform.

    If the attention does not support float32, the head_dim or the block size, others are used: see the rig's `head` and
    `config`.
    """
    shape = fit_attention(platform, attention, config.block_size, dtype)
    head = make_head(kind, 1, platform.device, shape.dtype, head_dim=shape.dim)
    return DraftRig(platform, head, with_blocks(config, shape.block), attention, bound=bound)


def float64_head(made: DraftRig, kind: str) -> Head:
    """Return the rig's head in float64 on the host."""
    dims = [layer.head_dim for layer in made.head.attention_layers] or [CONFIG.head_dim]
    return make_head(kind, 1, torch.device("cpu"), made.head.dtype, torch.float64, dims[0])


def run(made: DraftRig, batches: Sequence[HostBatch]) -> Rounds:
    """Propose for all batches, and return the results and the caches after them. Closes the rig."""
    rounds = [made.propose_to_host(batch) for batch in batches]
    caches = made.host_caches()
    made.close()
    return rounds, caches


def steps_of_slots(batches: Sequence[HostBatch], block_size: int, offset: int) -> dict[tuple[int, ...], list[int]]:
    """Return round, draft step and request that wrote each slot last, by its block and its place in the block.

    Args:
        offset: see `Kind.position_offset`.
    """
    found: dict[tuple[int, ...], list[int]] = {}
    for number, batch in enumerate(batches):
        for r, (start, count) in enumerate(zip(batch.start_positions, batch.num_sampled, strict=True)):
            first, blocks = start + offset, batch.blocks[r]
            for position in range(first, len(blocks) * block_size) if count else ():
                slot = blocks[position // block_size], position % block_size
                found[slot] = [number, max(position - first - count + 1, 0), r]
    return found


def _expect_same_keys(seen: Tensor, wanted: Tensor, what: str, steps: Mapping[tuple[int, ...], list[int]]) -> None:
    """Check keys or values, [blocks, block_size, ...], for the same bits. A failure names the first draft step."""
    differ = (seen != wanted).flatten(2).any(-1).nonzero().tolist() if seen.shape == wanted.shape else []
    if known := [steps[tuple(slot)] for slot in differ if tuple(slot) in steps]:
        number, step, request = min(known)
        what += f", first in round {number} at draft step {step} of request {request}"
    expect_equal(seen, wanted, what)


def assert_same(ours: Rounds, eager: Rounds, steps: Mapping[tuple[int, ...], list[int]] = MappingProxyType({})) -> None:
    """Check for the same bits in draft tokens, distributions, carried hidden states, and KV caches at the end.

    Args:
        steps: the draft step that wrote each slot; see `steps_of_slots`.
    """
    for number, (a, b) in enumerate(zip(ours[0], eager[0], strict=True)):
        expect_equal(a.token_ids, b.token_ids, f"draft tokens of round {number}, against eager,")
        expect_equal(a.hidden, b.hidden, f"hidden states of round {number}")
        if b.probs is not None:
            assert a.probs is not None
            expect_equal(a.probs, b.probs, f"draft distributions of round {number}")
    for layer, (a, b) in enumerate(zip(ours[1], eager[1], strict=True)):
        _expect_same_keys(a[0], b[0], f"keys of layer {layer}", steps)
        _expect_same_keys(a[1], b[1], f"values of layer {layer}", steps)


def compare(
    platform: Platform,
    config: DraftConfig,
    attention: str,
    seed: int,
    kind: str = "eagle",
    dtype: torch.dtype = torch.float32,
    sizes: Sequence[int] = BATCHES,
) -> None:
    """Propose for the same batches in `config.decode` and in eager, and check that graphs give the same bits.

    Prefill is not captured, here and in `follow_oracle`, because no prompt is prefilled.
    """
    config = replace(config, prefill="eager")
    if (most := max(sizes)) > config.max_num_requests:
        config = replace(config, max_num_requests=most, capture_sizes=(1, most))
    ours = rig(platform, config, attention, kind, dtype)
    batches = make_batches(ours.config, ours.head.aux_size, seed, sizes)
    rounds = run(ours, batches)
    assert all(r.from_graph for r in rounds[0]), "a batch ran without its graph"
    # The key of the cached eager run has no lowering, so that all lowerings are compared with the same run.
    config = replace(config, decode="eager")
    steps = steps_of_slots(batches, ours.config.block_size, ours.drafter.position_offset)
    assert_same(rounds, _eager_rounds(platform, config, attention, seed, kind, dtype, tuple(sizes)), steps)


@lru_cache
def _eager_rounds(
    platform: Platform,
    config: DraftConfig,
    attention: str,
    seed: int,
    kind: str,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
) -> Rounds:
    eager = rig(platform, config, attention, kind, dtype)
    return run(eager, make_batches(eager.config, eager.head.aux_size, seed, sizes))


def follow_oracle(
    platform: Platform, config: DraftConfig, attention: str, seed: int, sizes: Sequence[int], kind: str = "eagle"
) -> None:
    """Check proposes against the dense float64 drafter. Each starts from the KV that the device had before it."""
    made = rig(platform, replace(config, prefill="eager"), attention, kind)
    for batch in make_batches(made.config, made.head.aux_size, seed, sizes):
        if kind != "eagle":
            batch = away_from_the_end(made.config, batch)
        expect_oracle(made, batch, float64_head(made, kind))


def expect_oracle(made: DraftRig, batch: HostBatch, reference: Head, rows: Sequence[int] | None = None) -> DraftTokens:
    """Propose for one batch, and check drafts and KV against the head in float64 on the host, up to rounding.

    A token may differ from the oracle's only if the two nearly tie; the oracle then goes on with the device's token.
    For a head with several modules the oracle begins with the rows that the drafter kept from earlier passes.
    """
    tolerance = TOLERANCE[made.head.dtype]
    before = made.contexts(batch)
    proposed = made.propose(batch)
    drafts = on_host(proposed.token_ids)
    after = [(on_host(cache.key), on_host(cache.value)) for cache in made.caches]
    for r in range(batch.num_requests) if rows is None else rows:
        end, blocks = batch.start_positions[r] + batch.num_sampled[r], batch.blocks[r]
        room = max(made.config.max_model_len - end + 1, 1)  # draft steps with positions below max_model_len
        draft = dense_draft(reference, before[r], drafts[r, :room].tolist())
        short = [f"{value:.3f}" for value in draft.short]
        assert (draft.short < tolerance).all(), f"request {r}: logits of drafts {drafts[r].tolist()} fall {short} short"
        for layer, (key, value) in enumerate(after):
            for name, cache, wanted in (("keys", key, draft.keys[layer]), ("values", value, draft.values[layer])):
                stored = gather_request(cache, blocks, wanted.shape[0]).double()
                expect_close(stored, wanted, tolerance, f"{name} of layer {layer} of request {r}")
    return proposed


def away_from_the_end(config: DraftConfig, batch: HostBatch) -> HostBatch:
    """Return the batch with all rows and drafts moved before max_model_len: the oracle does not cover rows past it."""
    last = config.max_model_len - 2 * config.query_len - 1
    return replace(batch, start_positions=[min(start, last) for start in batch.start_positions])
