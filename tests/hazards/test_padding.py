"""Padded batches: the rows after the real requests are inert, and each pass has the right number of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from specgraph_conformance.draft_comparison import follow_oracle, rig
from specgraph_conformance.draft_rig import DraftRig, HostBatch, make_batches, make_config, num_blocks
from specgraph_conformance.rig import expect_equal, on_host
from specgraph_conformance.tiny_models import make_head
from torch import Tensor

from specgraph.attention import NULL_BLOCK, NULL_SLOT
from specgraph.device import Platform


def test_idle_between_rounds(platform: Platform, seed: int) -> None:
    """A propose without requests runs the launches of one with requests, writes no KV, and changes no later round."""
    config = make_config(decode="auto")
    made, busy = rig(platform, config, "paged"), rig(platform, config, "paged")
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


@pytest.mark.hazard("stale-padding-rows")
def test_smaller_batch_after_larger(platform: Platform, seed: int) -> None:
    """After a larger batch, a smaller one drafts what it drafts alone, and the rows after it are inert."""
    made = _after_larger(platform, seed, lambda made, small: made.propose(small).token_ids)
    counts = on_host(made.drafter.buffers.shared.num_sampled).tolist()[1:]
    assert counts == [0, 0, 0], f"padded requests keep num_sampled {counts} of the larger batch: they are not inert"
    slots = on_host(made.drafter.read_set()["buffers.first.slot_mapping"])[made.config.query_len :].unique().tolist()
    assert slots == [NULL_SLOT], f"padded rows keep slots {slots}"


@pytest.mark.hazard("stale-padding-in-place")
def test_smaller_batches_in_place(platform: Platform, seed: int) -> None:
    """Each of several smaller batches that are written in the drafter's own memory, with a larger one before it, drafts
    what it drafts alone, and writes no KV of the others."""

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


@pytest.mark.hazard("buffer-smaller-than-padded-size")
def test_largest_batch_fits(platform: Platform, seed: int) -> None:
    """The largest batch drafts what the float64 chain drafts: every buffer holds the padded maximum."""
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
@pytest.mark.hazard("step-ladder-overpadding")
def test_later_steps_have_one_row_per_request(platform: Platform, lowering: str, seed: int) -> None:
    """Step 0 runs K + 1 rows per request, and each later step one."""
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
