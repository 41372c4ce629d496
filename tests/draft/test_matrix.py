"""Drafter x lowering and prefill mode x device or host lengths x K, over ragged prompts and changing batches.

Each drafter meets each way and each K, and each K a fifth of the ways. A cell decodes the same requests as the eager
decoder of its drafter and K, and must leave the same tokens, the same acceptance and the same bits in both KV caches;
and the tokens are those of the target alone.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import NamedTuple

import pytest
import torch
from draft.pairs import DRAFTERS, VOCAB, make_head, make_target

from specgraph.attention import PagedAttention, PagedHostAttention
from specgraph.device.cpu import CpuPlatform
from specgraph.engine import EngineConfig, Request, SpeculativeDecoder

WAYS = (
    ("eager", "eager"),
    ("eager", "full"),
    ("piecewise", "piecewise"),
    ("piecewise", "full"),
    ("step", "full"),
    ("merged", "full"),
    ("step", "eager"),
    ("merged", "eager"),
    ("merged", "piecewise"),
)
KS = (1, 2, 3, 5, 8)
LENGTHS = ("device", "host")
CELLS = [(way, lengths) for way, lengths in product(WAYS, LENGTHS) if (way, lengths) != (WAYS[0], "device")]
PROMPTS = ((1, 7), (5, 12), (19, 4), (12, 9))
"""Rows and tokens to generate, a request: with prompt passes of up to 8 rows the last two come in chunks."""


class Decoded(NamedTuple):
    tokens: list[list[int]]
    accepted: list[int]
    caches: list[torch.Tensor]


def requests():
    g = torch.Generator().manual_seed(11)
    return [
        Request(prompt_token_ids=torch.randint(0, VOCAB, (rows,), generator=g).tolist(), max_tokens=tokens)
        for rows, tokens in PROMPTS
    ]


def decode(kind, way, k, lengths, query_len=None, **settings):
    platform, target = CpuPlatform(), make_target()
    # Host lengths wait for each round: none ahead in any way, so that all run the same rounds and write the same keys.
    limits = {"max_num_requests": 3, "max_model_len": 56, "block_size": 4, "capture_sizes": [1, 3], "rounds_ahead": 0}
    limits |= settings
    config = EngineConfig(num_speculative_tokens=k, prefill_sizes=[8], decode=way[0], prefill=way[1], **limits)
    attention = PagedHostAttention(platform) if lengths == "host" else PagedAttention()
    head = None if kind is None else make_head(kind, target)
    with torch.inference_mode():
        decoder = SpeculativeDecoder(target, head, platform, config, query_len=query_len, attention=attention)
        decoder.capture()
        results = decoder.generate(requests())
    assert [r.finish_reason for r in results] == ["length"] * len(results)
    caches = [*decoder.target.caches, *(decoder.drafter.caches if decoder.drafter else [])]
    decoder.close()
    return Decoded([r.token_ids for r in results], decoder.metrics.accepted, [t for cache in caches for t in cache])


@cache
def target_alone(k):
    """At the shape of a verify pass: one kept token a pass, K + 1 rows."""
    return decode(None, WAYS[0], k, "device", query_len=k + 1).tokens


def assert_same(got, wanted, cell):
    assert got.tokens == wanted.tokens, cell
    assert got.accepted == wanted.accepted, cell
    for a, b in zip(got.caches, wanted.caches, strict=True):
        assert torch.equal(a, b), cell


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_every_way_is_as_eager_and_as_the_target_alone(kind, k):
    wanted = decode(kind, WAYS[0], k, "device")
    assert wanted.tokens == target_alone(k)
    for cell in CELLS[KS.index(k) :: len(KS)]:
        way, lengths = cell
        assert_same(decode(kind, way, k, lengths), wanted, cell)


def test_drafts_are_accepted_at_many_lengths():
    """Otherwise the matrix would say little."""
    accepted = decode("eagle", WAYS[0], 5, "device").accepted
    assert accepted[0] > accepted[4] > 0


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize(("way", "lengths"), [(("merged", "full"), "device"), (("step", "eager"), "host")])
def test_k_follows_the_batch(kind, way, lengths):
    """K 5, 3 and 0 for 1, 2 and 3 requests: each change of the batch changes the rows of a round and the drafts."""
    schedule = {"draft_schedule": {1: 5, 2: 3, 3: 0}, "capture_sizes": [1, 2, 3]}
    wanted = decode(kind, WAYS[0], 5, "device", **schedule)
    got = decode(kind, way, 5, lengths, **schedule)
    assert wanted.tokens == target_alone(5)
    assert_same(got, wanted, (way, lengths))
