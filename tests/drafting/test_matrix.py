"""Drafter x graph mode and lowering x attention flavour x K, over ragged prompts and batches that shrink and grow.

The whole matrix has 480 cells. A fixed cover runs every *pair* of values of any two dimensions at least once (a test
counts them). Each cell decodes the same requests as the eager decoder of its drafter and K, and must leave the same
tokens, the same acceptance and the same bits in both KV caches; and the tokens are those of the target alone.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations, product
from typing import NamedTuple

import pytest
import torch
from drafting.pairs import DRAFTERS, VOCAB, make_head, make_target

from specgraph.attention import PagedAttention, PagedHostAttention
from specgraph.decoding import Request, SpeculativeDecoder
from specgraph.drafting import DraftConfig
from specgraph.reference import CpuPlatform

WAYS = (
    ("NONE", "eager"),
    ("PIECEWISE", "piecewise"),
    ("FULL", "step"),
    ("FULL", "merged"),
    ("FULL_DECODE_ONLY", "step"),
    ("FULL_DECODE_ONLY", "merged"),
    ("FULL_AND_PIECEWISE", "step"),
    ("FULL_AND_PIECEWISE", "merged"),
)
KS = (1, 2, 3, 5, 8)
FLAVOURS = ("device", "host")
DIMENSIONS = (DRAFTERS, WAYS, KS, FLAVOURS)
PROMPTS = ((1, 9), (5, 14), (23, 6), (12, 11))
"""Rows and tokens to generate, a request: with prompt passes of up to 16 rows the third comes in chunks."""


def pairs_of(cell):
    return {(i, cell[i], j, cell[j]) for i, j in combinations(range(len(cell)), 2)}


@cache
def cover():
    """Greedy: take the cell that covers the most pairs not yet covered, until none is left. Always the same cells."""
    missing = set().union(*(pairs_of(cell) for cell in product(*DIMENSIONS)))
    cells = []
    while missing:
        cells.append(max(product(*DIMENSIONS), key=lambda cell: len(pairs_of(cell) & missing)))
        missing -= pairs_of(cells[-1])
    return cells


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


def decode(kind, way, k, flavour, query_len=None, **settings):
    platform, target = CpuPlatform(), make_target()
    limits = {"max_num_requests": 3, "max_model_len": 56, "block_size": 4, "capture_sizes": [1, 3]} | settings
    config = DraftConfig(num_speculative_tokens=k, prefill_sizes=[8, 16], mode=way[0], lowering=way[1], **limits)
    attention = PagedHostAttention(platform) if flavour == "host" else PagedAttention()
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
def eager(kind, k):
    return decode(kind, WAYS[0], k, "device")


@cache
def target_alone(k):
    """At the shape of a verify pass: one kept token a pass, K + 1 rows."""
    return decode(None, WAYS[0], k, "device", query_len=k + 1).tokens


def name(cell):
    kind, (mode, lowering), k, flavour = cell
    return f"{kind}-{mode}-{lowering}-k{k}-{flavour}"


@pytest.mark.parametrize("cell", cover(), ids=name)
def test_same_as_eager_and_as_the_target_alone(cell):
    kind, _, k, _ = cell
    wanted, got = eager(kind, k), decode(*cell)
    assert wanted.tokens == target_alone(k)
    assert got.tokens == wanted.tokens
    assert got.accepted == wanted.accepted
    for a, b in zip(got.caches, wanted.caches, strict=True):
        assert torch.equal(a, b)


def test_the_cover_has_every_pair_and_acceptance_of_every_length():
    every = set().union(*(pairs_of(cell) for cell in product(*DIMENSIONS)))
    assert every == set().union(*map(pairs_of, cover()))
    assert len(cover()) < 60
    accepted = eager("eagle", 5).accepted
    assert accepted[0] > accepted[4] > 0, "drafts of the pair must be accepted at many lengths"


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize(("way", "flavour"), [(WAYS[3], "device"), (WAYS[4], "host")])
def test_k_follows_the_batch(kind, way, flavour):
    """K 5, 3 and 0 for 1, 2 and 3 requests: each change of the batch changes the rows of a round and the drafts."""
    schedule = {"draft_schedule": {1: 5, 2: 3, 3: 0}, "capture_sizes": [1, 2, 3]}
    wanted = decode(kind, WAYS[0], 5, "device", **schedule)
    got = decode(kind, way, 5, flavour, **schedule)
    assert wanted.tokens == target_alone(5)
    assert got.tokens == wanted.tokens
    assert got.accepted == wanted.accepted
    for a, b in zip(got.caches, wanted.caches, strict=True):
        assert torch.equal(a, b)
