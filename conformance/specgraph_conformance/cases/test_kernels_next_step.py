"""What lies between two greedy draft steps of one launch: the token, one place further, and the next step's input."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from specgraph import ops
from specgraph.device import Platform

from specgraph_conformance.case import case
from specgraph_conformance.linear_oracles import TOLERANCE, first_of_largest, head_of_ties, normed, small_integers
from specgraph_conformance.rig import WAYS, expect_close, expect_equal, on_host, run_op, slot_of

LIMIT, BLOCK, EPS = 48, 16, 0.03
LENGTHS = [15, 16, 47, 0, 1, 31, 32, 46, 48]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the head's input, the vocabulary, and the embedding and hidden state that the next step begins with."""

    dtype: torch.dtype
    head: int
    vocab: int
    embedding: int
    hidden: int
    every: int = 1
    """See `head_of_ties`."""


SMALL = Sizes(torch.float32, 32, 90, 24, 40)
IN_TILES = Sizes(torch.bfloat16, 512, 3000, 256, 512)
"""Half precision and input columns that tiles divide: what a device's own kernel of the head takes."""


@pytest.mark.parametrize("requests", [1, 9, 81])
@pytest.mark.parametrize("way", WAYS)
@case(
    "kernels.greedy-next-step",
    "Three steps in a row write the lowest of the most likely tokens as target ids into the columns of the steps, move "
    "live requests one place further, and give the normed embedding and hidden state of the next step.",
    hazard="metadata-not-rebuilt-between-steps",
    cause="greedy_next_step: the embedding of the token before, the column of the next step, a draft id that is not "
    "mapped, a maximum that takes the last of equals, or places of other requests",
)
def test_next_step(platform: Platform, way: str, requests: int, seed: int) -> None:
    _three_steps(platform, way, requests, SMALL, seed)


@pytest.mark.parametrize("requests", [1, 16, 40, 64])
@pytest.mark.parametrize("way", WAYS)
@case(
    "kernels.greedy-next-step-in-tiles",
    "In bfloat16, with 512 input columns and 3,000 tokens, three steps in a row write the lowest of the most likely "
    "tokens, move live requests one place further, and give the normed input of the next step.",
    hazard="heads-in-tiles",
    cause="greedy_next_step: blocks of the vocabulary merged wrongly, the last of equals, or parts of another request",
)
def test_in_tiles(platform: Platform, way: str, requests: int, seed: int) -> None:
    _three_steps(platform, way, requests, IN_TILES, seed)


@pytest.mark.parametrize(("vocab", "requests"), [(9000, 40), (32000, 100), (32000, 150)])
@pytest.mark.parametrize("way", WAYS)
@case(
    "kernels.greedy-next-step-of-many",
    "In bfloat16, with 2,048 input columns and 9,000 or 32,000 tokens, three steps of 40 to 150 requests write the "
    "lowest of the most likely tokens, move live requests one place further, and give the next step's input.",
    hazard="heads-in-tiles",
    cause="greedy_next_step: a kernel for many rows or tokens: its tiles merged wrongly, or those past the last token",
)
def test_of_many(platform: Platform, way: str, vocab: int, requests: int, seed: int) -> None:
    _three_steps(platform, way, requests, Sizes(torch.bfloat16, 2048, vocab, 256, 512, every=2), seed)


def _three_steps(platform: Platform, way: str, requests: int, sizes: Sizes, seed: int) -> None:
    device, g, dtype, vocab = platform.device, torch.Generator().manual_seed(seed), sizes.dtype, sizes.vocab
    lengths = (LENGTHS * 17)[:requests]
    inputs = [small_integers(g, (requests, sizes.head)) for _ in range(3)]
    weight = head_of_ties(g, torch.cat(inputs), vocab, sizes.every)
    offsets = torch.randint(0, 7, (vocab,), generator=g)
    table = torch.randn(vocab + 7, sizes.embedding, generator=g).to(dtype)
    norms = [torch.randn(n, generator=g).to(dtype) for n in (sizes.embedding, sizes.hidden)]
    blocks = [[3 * r + 1, 3 * r + 2, 3 * r + 3 if r % 2 else 0] for r in range(requests)]
    fixed = (weight.to(dtype), offsets, table, *norms, torch.tensor(blocks, dtype=torch.int32))
    w, d2t, embedding, n0, n1, block_table = (t.to(device) for t in fixed)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    positions, slots, ids = (torch.full((requests,), -77, device=device) for _ in range(3))
    step, drafts = torch.zeros(1, dtype=torch.int64, device=device), torch.full((requests, 4), -77, device=device)
    rows, states, pair = (
        torch.zeros(requests, n, dtype=dtype, device=device)
        for n in (sizes.head, sizes.hidden, sizes.embedding + sizes.hidden)
    )
    written = seq_lens, positions, slots, step, ids, drafts, pair

    def work() -> None:
        moved = seq_lens, positions, slots, block_table, LIMIT, BLOCK
        head, to = ops.Head(None, 0.0, w), ops.Drafts(drafts, d2t, step, ids)
        pair.copy_(ops.greedy_next_step(rows, head, to, *moved, embedding, n0, states, n1, EPS))

    for number, x in enumerate(inputs):
        hidden = (torch.randn(requests, sizes.hidden, generator=g) * (0.1, 1.0, 20.0)[number]).to(dtype)
        rows.copy_(x.to(dtype))
        states.copy_(hidden)
        run_op(platform, way, work, written)
        best = first_of_largest(x @ weight.T)  # small integers: exact in float32
        tokens = best + offsets[best]
        expect_equal(on_host(ids), tokens, f"the tokens of step {number}")
        expect_equal(on_host(drafts)[:, number], tokens, f"column {number}")
        expect_equal(on_host(drafts)[:, number + 1 :], torch.full((requests, 3 - number), -77), "the columns after it")
        lengths = [n + 1 if n else 0 for n in lengths]
        expect_equal(on_host(seq_lens), torch.tensor(lengths, dtype=torch.int32), f"lengths after step {number}")
        wanted = torch.tensor([min(max(n - 1, 0), LIMIT - 1) for n in lengths])
        expect_equal(on_host(positions), wanted, f"positions after step {number}")
        wanted = torch.tensor([slot_of(n - 1, row, LIMIT, BLOCK) for n, row in zip(lengths, blocks, strict=True)])
        expect_equal(on_host(slots), wanted, f"slots after step {number}")
        assert on_host(step).tolist() == [number + 1]
        expected = torch.cat((normed(table[tokens], norms[0], EPS), normed(hidden, norms[1], EPS)), dim=-1)
        tolerance = 1e-4 if dtype == torch.float32 else TOLERANCE[dtype]
        expect_close(on_host(pair), expected, tolerance, f"the input of the step after {number}")
