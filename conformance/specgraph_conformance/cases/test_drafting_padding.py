"""Padded batches: the rows after the real requests are inert, and each pass has the right number of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from specgraph.attention import NULL_BLOCK, NULL_SLOT
from specgraph.device import Platform
from torch import Tensor

from specgraph_conformance.case import case
from specgraph_conformance.draft_comparison import follow_oracle, rig
from specgraph_conformance.draft_rig import DraftRig, HostBatch, make_batches, make_config, num_blocks
from specgraph_conformance.rig import expect_equal, on_host
from specgraph_conformance.tiny_models import make_head


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
    "drafting.idle-between-rounds",
    "A propose without requests runs the launches of one with requests, writes no KV, and changes no later round.",
    cause="an idle rank skips the launch that its peers' collectives wait for, or its inert rows write KV",
)
def test_idle(platform: Platform, attention: str, seed: int) -> None:
    config = make_config(decode="auto")
    made, busy = rig(platform, config, attention), rig(platform, config, attention)
    sizes = (3, 1, 2, 4)
    for batch, size in zip(make_batches(made.config, made.head.aux_size, seed, sizes), sizes, strict=True):
        before, caches = sum(made.drafter.launches.values()), made.host_caches()
        idle_batch = made.drafter.inputs(size)
        idle_batch.num_sampled.zero_()
        made.drafter.propose(idle_batch, host_start_positions=[], host_num_sampled=[])
        idle = sum(made.drafter.launches.values()) - before
        for now, old in zip(made.host_caches(), caches, strict=True):
            expect_equal(now[0], old[0])
            expect_equal(now[1], old[1])
        ours, expected = made.propose_to_host(batch), busy.propose_to_host(batch)
        assert sum(made.drafter.launches.values()) - before == 2 * idle
        assert ours.token_ids.tolist() == expected.token_ids.tolist()


@case(
    "drafting.smaller-batch-after-larger",
    "After a larger batch, a smaller one drafts what it drafts alone, and the rows after it are inert.",
    hazard="stale-padding-rows",
    cause="the tail of the buffers keeps the last, larger batch",
)
def test_shrinking(platform: Platform, seed: int) -> None:
    made = _after_larger(platform, seed, lambda made, small: made.propose(small).token_ids)
    counts = on_host(made.drafter.buffers.shared.num_sampled).tolist()[1:]
    assert counts == [0, 0, 0], f"padded requests keep num_sampled {counts} of the larger batch: they are not inert"
    slots = on_host(made.drafter.read_set()["buffers.first.slot_mapping"])[made.config.query_len :].unique().tolist()
    assert slots == [NULL_SLOT], f"padded rows keep slots {slots}"


@case(
    "drafting.smaller-batches-in-place",
    "Each of several smaller batches that are written in the drafter's own memory, with a larger one before it, drafts "
    "what it drafts alone, and writes no KV of the others.",
    hazard="stale-padding-in-place",
    cause="requests behind a batch in place are those of the last one: not all are made inert, or only once",
)
def test_shrinking_in_place(platform: Platform, seed: int) -> None:
    def propose(made: DraftRig, small: HostBatch) -> Tensor:
        handed, inputs = small.on(platform.device, made.head.dtype), made.drafter.inputs(1)
        inputs.block_table.fill_(NULL_BLOCK)
        for name in ("sampled_token_ids", "num_sampled", "start_positions", "aux_hidden", "block_table"):
            values = getattr(handed, name)
            getattr(inputs, name)[tuple(map(slice, values.shape))] = values
        drafts = made.drafter.propose(
            inputs, host_start_positions=small.start_positions, host_num_sampled=small.num_sampled
        )
        return drafts.token_ids

    _after_larger(platform, seed, propose)


def _after_larger(platform: Platform, seed: int, propose: Callable[[DraftRig, HostBatch], Tensor]) -> DraftRig:
    """Check three times that a batch of one drafts the same after a larger batch, and writes no KV of other requests.

    Args:
        propose: takes a drafter and the small batch, and returns the drafts.
    """
    config = make_config(decode="auto", capture_sizes=(4,))
    made, alone = rig(platform, config, "paged"), rig(platform, config, "paged")
    full, small = make_batches(config, made.head.aux_size, seed, [4, 1])
    fresh = [tuple(tensor[small.blocks[0]].clone() for tensor in cache) for cache in alone.caches]
    wanted = alone.propose_to_host(small).token_ids
    others = [block for block in range(num_blocks(config) - 1) if block + 1 not in small.blocks[0]]
    for time in range(3):
        made.propose_to_host(full)
        for mine, kept in zip(made.caches, fresh, strict=True):
            for tensor, values in zip(mine, kept, strict=True):
                tensor[1:] = 7.0  # the same rows again would write the values that are already there
                tensor[small.blocks[0]] = values
        before = made.host_caches()
        what = f"batch {time} after a larger one"
        expect_equal(on_host(propose(made, small)), wanted, f"the drafts of {what}")
        for (key, value), (old_key, old_value) in zip(made.host_caches(), before, strict=True):
            expect_equal(key[others], old_key[others], f"keys in blocks of no request of {what}")
            expect_equal(value[others], old_value[others], f"values in blocks of no request of {what}")
    return made


@case(
    "drafting.largest-batch-fits",
    "The largest batch drafts what the float64 chain drafts: every buffer holds the padded maximum.",
    hazard="buffer-smaller-than-padded-size",
    cause="a buffer is allocated for the asked maximum and sliced at the padded one",
)
def test_largest(platform: Platform, seed: int) -> None:
    config = make_config(decode="auto", max_num_requests=5, capture_sizes=(2, 5))
    follow_oracle(platform, config, "paged", seed, [5, 3])


class RowCount:
    """Wraps a head, and records the number of rows of each pass."""

    pair_input = None

    def __init__(self, head: Any) -> None:
        self.head = head
        self.rows: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.head, name)

    def forward(self, token_ids: Tensor, *args: Any) -> Any:
        """Count the rows, and call the wrapped head."""
        self.rows.append(token_ids.shape[0])
        return self.head.forward(token_ids, *args)


@pytest.mark.parametrize("lowering", ["step", "merged"])
@case(
    "drafting.later-steps-have-one-row-per-request",
    "Step 0 runs K + 1 rows per request, and each later step one.",
    hazard="step-ladder-overpadding",
    cause="later steps are captured with the size ladder of step 0",
)
def test_rows(platform: Platform, lowering: str, seed: int) -> None:
    head: Any = RowCount(make_head("eagle", 1, platform.device))
    config = make_config(decode=lowering, k=3, max_num_requests=5, capture_sizes=(2, 5))
    made = DraftRig(platform, head, config)
    for batch in make_batches(config, head.aux_size, seed, [2, 5]):
        made.propose_to_host(batch)
    q = config.query_len
    # Prefill is captured too, at other sizes.
    missing = {2 * q, 2, 5 * q, 5} - set(head.rows)
    assert not missing, (
        f"no pass had {sorted(missing)} rows: batches of 2 and 5 requests ran passes of {set(head.rows)}"
    )
    assert head.rows.count(2) >= head.rows.count(2 * q), "later steps of 2 requests ran with the rows of the first"


@pytest.mark.parametrize("k", [1, 2, 3, 5, 7])
@case(
    "drafting.rows-are-aligned",
    "A captured size's rows are its requests times the rows of one, never rounded on their own.",
    hazard="block-misaligned-sizes",
    cause="row counts are rounded to a multiple of something else than K + 1",
    quick=True,
)
def test_alignment(platform: Platform, k: int) -> None:
    made = rig(platform, make_config(decode="auto", k=k), "paged")
    assert made.drafter.graphs is not None
    for descriptor in made.drafter.graphs.descriptors:
        if descriptor.phase == "prefill":
            continue
        rows = 1 if descriptor.phase == "step" else k + 1
        wanted = descriptor.num_requests * rows
        assert descriptor.num_tokens == wanted, f"{descriptor} has {descriptor.num_tokens} rows instead of {wanted}"
    for n in range(1, made.config.max_num_requests + 1):
        found = made.drafter.dispatch(n).descriptor
        assert found.num_tokens % (k + 1) == 0, f"{n} requests run at {found.num_tokens} rows, no multiple of {k + 1}"
