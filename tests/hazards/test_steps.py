"""Draft steps: few of them, the KV of each, and the last positions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from specgraph_conformance.draft_comparison import compare, follow_oracle, rig
from specgraph_conformance.draft_rig import make_batches, make_config
from specgraph_conformance.rig import expect_equal, on_host

from specgraph.device import Platform


@pytest.mark.hazard("k-equals-2")
def test_k_equals_two(platform: Platform, seed: int) -> None:
    """With two draft tokens, sizes, columns and rows are right."""
    compare(platform, make_config(decode="auto", k=2), "paged", seed)
    follow_oracle(platform, make_config(decode="auto", k=2), "paged", seed, [4, 1])


LOOPS = ["step", "merged"]
"""The lowerings with ops of their own between two draft steps."""


@pytest.mark.parametrize("lowering", LOOPS)
@pytest.mark.hazard("chain-without-slots")
def test_each_step_writes_its_kv(platform: Platform, lowering: str, seed: int) -> None:
    """After a propose, the cache holds the key and the value of each draft step."""
    config = make_config(decode=lowering, k=4)
    made = rig(platform, config, "paged")
    config = made.config
    (batch,) = make_batches(config, made.head.aux_size, seed, [1])
    batch = replace(batch, num_sampled=[config.query_len])
    before = made.host_caches()
    made.propose_to_host(batch)
    start, block = batch.start_positions[0] + config.query_len, config.block_size
    for step in range(config.num_speculative_tokens - 1):
        position = start + step
        index, offset = batch.blocks[0][position // block] - 1, position % block
        for (key, value), (old_key, old_value) in zip(made.host_caches(), before, strict=True):
            assert not torch.equal(key[index, offset], old_key[index, offset]), f"no key of draft step {step + 1}"
            assert not torch.equal(value[index, offset], old_value[index, offset]), f"no value of step {step + 1}"


@pytest.mark.parametrize("lowering", LOOPS)
@pytest.mark.hazard("max-len-clamp")
def test_up_to_the_last_position(platform: Platform, lowering: str, seed: int) -> None:
    """Drafts that pass the end of max_model_len write nothing there and stay within the rotary table."""
    config = make_config(decode=lowering, k=5, max_model_len=32, max_num_requests=2)
    made = rig(platform, config, "paged")
    config, end = made.config, made.config.max_model_len
    (any_batch,) = make_batches(config, made.head.aux_size, seed, [2])
    for start, count in ((end - 6, 6), (end - 3, 3), (end - 2, 2), (end - 1, 1)):
        blocks = [[1, 2], [3, 4]]
        batch = replace(any_batch, start_positions=[start] * 2, num_sampled=[count, 1], blocks=blocks)
        before = made.host_caches()
        made.propose_to_host(batch)
        positions = on_host(made.drafter.read_set()["buffers.step.positions"])
        least, most = int(positions.min()), int(positions.max())
        assert least >= 0, f"a draft step from position {start} has position {least}"
        assert most < end, f"a draft step from position {start} has position {most}, past max_model_len {end}"
        for (key, _), (old, _) in zip(made.host_caches(), before, strict=True):
            expect_equal(key[4:], old[4:], "a block of no request")
            rows = start % config.block_size
            expect_equal(key[1, :rows], old[1, :rows], "a position before the rows")
            expect_equal(key[0], old[0], "the first block, which no row is in")
