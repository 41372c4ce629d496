"""Padded batches: the rows after the real requests are inert, and each pass has the right number of rows."""

from __future__ import annotations

from specgraph.device import Platform

from specgraph_conformance.case import case
from specgraph_conformance.draft_comparison import rig
from specgraph_conformance.draft_rig import make_batches, make_config


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
