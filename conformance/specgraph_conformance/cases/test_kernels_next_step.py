"""What lies between two greedy draft steps of one launch: the token, one place further, and the next step's input."""

from __future__ import annotations

import pytest
import torch
from specgraph import kernels
from specgraph.platforms import Platform

from specgraph_conformance.case import case
from specgraph_conformance.rig import WAYS, expect_close, expect_equal, on_host, run_op, slot_of

LIMIT, BLOCK, VOCAB, EPS = 48, 16, 90, 0.03
LENGTHS = [15, 16, 47, 0, 1, 31, 32, 46, 48]


def _normed(x: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """In float64."""
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * norm.double()


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
    device, g = platform.device, torch.Generator().manual_seed(seed)
    lengths = (LENGTHS * 9)[:requests]
    # Small integers: every sum is exact, so that equal logits are equal in every order of the sums.
    weight = torch.randint(-3, 4, (VOCAB // 2, 32), generator=g).float()
    weight = torch.cat((weight, weight))  # every logit twice
    offsets = torch.randint(0, 7, (VOCAB,), generator=g)
    table, norms = torch.randn(VOCAB + 7, 24, generator=g), [torch.randn(n, generator=g) for n in (24, 40)]
    blocks = [[3 * r + 1, 3 * r + 2, 3 * r + 3 if r % 2 else 0] for r in range(requests)]
    fixed = tuple(t.to(device) for t in (weight, offsets, table, *norms, torch.tensor(blocks, dtype=torch.int32)))
    w, d2t, embedding, n0, n1, block_table = fixed
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    positions, slots, ids = (torch.full((requests,), -77, device=device) for _ in range(3))
    step, drafts = torch.zeros(1, dtype=torch.int64, device=device), torch.full((requests, 4), -77, device=device)
    rows, states = torch.zeros(requests, 32, device=device), torch.zeros(requests, 40, device=device)
    pair = torch.zeros(requests, 64, device=device)
    written = seq_lens, positions, slots, step, ids, drafts, pair

    for number in range(3):
        x = torch.randint(-3, 4, (requests, 32), generator=g).float()
        hidden = torch.randn(requests, 40, generator=g) * torch.tensor([0.1, 1.0, 20.0])[number]
        rows.copy_(x)
        states.copy_(hidden)
        run_op(
            platform,
            way,
            lambda: pair.copy_(
                kernels.greedy_next_step(
                    rows,
                    None,
                    0.0,
                    w,
                    d2t,
                    step,
                    ids,
                    drafts,
                    seq_lens,
                    positions,
                    slots,
                    block_table,
                    LIMIT,
                    BLOCK,
                    embedding,
                    n0,
                    states,
                    n1,
                    EPS,
                )
            ),
            written,
        )
        best = torch.tensor([row.index(max(row)) for row in (x.double() @ weight.double().T).tolist()])
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
        expected = torch.cat((_normed(table[tokens], norms[0]), _normed(hidden, norms[1])), dim=-1)
        expect_close(on_host(pair), expected, 1e-4, f"the input of the step after {number}")
