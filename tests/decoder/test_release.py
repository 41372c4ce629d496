"""A decoder that is dropped without `close` is freed at once: no reference cycle keeps graphs and KV caches."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from specgraph_run.decoder import SpeculativeDecoder

from specgraph.attention import KVCache, PagedAttention
from specgraph.cpu.platform import CpuPlatform
from specgraph.draft import DraftConfig, Drafter, ProposeBatch

LIMITS = {"num_speculative_tokens": 2, "max_num_requests": 2, "max_model_len": 64, "block_size": 4}


@pytest.fixture(autouse=True)
def _no_collection():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def graphs_of(runner):
    return [piece for captured in runner.graphs._captured.values() for piece in captured.pieces]


@pytest.mark.parametrize("lowering", ["piecewise", "merged"])
def test_a_dropped_decoder_frees_its_graphs_and_caches(target, shadow, requests, lowering):
    platform = CpuPlatform()
    decoder = SpeculativeDecoder(target, shadow, platform, DraftConfig(**LIMITS, decode=lowering, prefill_sizes=[8]))
    decoder.capture()
    stream = decoder.stream(requests[:2])
    next(stream)
    held = [decoder, *decoder.runners.values()]
    held += [piece for runner in decoder.runners.values() for piece in graphs_of(runner)]
    held += [cache.key for runner in (decoder.target, decoder.drafter) for cache in runner.caches]
    left = [weakref.ref(each) for each in held]
    assert len(left) > 10
    del decoder, stream, held
    assert [ref() for ref in left if ref() is not None] == []
    platform.close()


def test_a_dropped_drafter_with_bound_tensors_frees_its_graphs_and_caches(shadow):
    platform, config = CpuPlatform(), DraftConfig(**LIMITS, capture_sizes=[2], prefill_sizes=[4])
    caches = [KVCache(*torch.zeros(2, 40, 4, layer.num_kv_heads, layer.head_dim)) for layer in shadow.attention_layers]
    drafter = Drafter(shadow, caches, platform, config, attention=PagedAttention())
    bound = drafter.bind(
        ProposeBatch(
            sampled_token_ids=torch.zeros(2, 3, dtype=torch.int64),
            num_sampled=torch.zeros(2, dtype=torch.int32),
            start_positions=torch.zeros(2, dtype=torch.int64),
            aux_hidden=torch.zeros(6, shadow.aux_size),
            block_table=torch.zeros(2, config.max_blocks, dtype=torch.int32),
        )
    )
    drafter.capture()
    drafter.propose(drafter.inputs(1, bound=bound))
    drafter.propose(drafter.inputs(2))
    left = [
        weakref.ref(each) for each in (drafter, bound, caches[0].key, drafter.shared.aux_hidden, *graphs_of(drafter))
    ]
    del drafter, bound, caches
    assert [ref() for ref in left if ref() is not None] == []
    platform.close()
