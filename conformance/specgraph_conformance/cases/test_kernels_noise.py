"""The noise of sampling ops: a function of seed, position and purpose, against 64-bit arithmetic in Python integers."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from specgraph import ops
from specgraph.device import Platform
from specgraph.ops import noise
from torch import Tensor

from specgraph_conformance.case import case
from specgraph_conformance.rig import WAYS, on_host, run_op

DRAFT, ACCEPT, RESAMPLE = 1, 2, 3
"""Purposes of noise (`specgraph.ops.noise`)."""
ALL = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio: the increment of SplitMix64."""
REQUESTS, VOCAB, TEMPERATURE = 40, 7, 0.8


def mixed(x: int) -> int:
    """The finaliser of SplitMix64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & ALL
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & ALL
    return x ^ (x >> 31)


def uniform(seed: int, position: int, purpose: int, count: int) -> list[float]:
    """Numbers in (0, 1) with 23 bits: the stream that begins at the hash of seed, purpose and position."""
    key = mixed((mixed((seed * 4 + purpose) & ALL) + position * GOLDEN) & ALL)
    return [((mixed((key + (index + 1) * GOLDEN) & ALL) >> 41) + 0.5) / (1 << 23) for index in range(count)]


def drawn(logits: Tensor, seed: int, position: int, purpose: int) -> tuple[int, float]:
    """The token that the noise picks from softmax(logits / TEMPERATURE), and by how much it leads, in float64."""
    gumbel = [-math.log(-math.log(u)) for u in uniform(seed, position, purpose, len(logits))]
    keys = sorted(
        ((x / TEMPERATURE + n, token) for token, (x, n) in enumerate(zip(logits.tolist(), gumbel, strict=True)))
    )
    return keys[-1][1], keys[-1][0] - keys[-2][0]


Drawing = tuple[Tensor, Tensor, int]
"""Tokens [REQUESTS, n], the position of the first one for each request, and the purpose of the noise."""


def draft_gumbel(platform: Platform, way: str, logits: Tensor, seeds: Tensor, at: Tensor) -> Drawing:
    """A row that sees n keys decides the token of position n + 1."""
    ids, drafts, probs, rest = _drafting(platform, seeds, at)
    there = logits[:, 0].contiguous().to(platform.device)
    written = ids, drafts, probs
    run_op(platform, way, lambda: ops.draft_gumbel(there, None, *rest, *written), written)
    return on_host(ids)[:, None], at + 1, DRAFT


def gumbel_head(platform: Platform, way: str, logits: Tensor, seeds: Tensor, at: Tensor) -> Drawing:
    """The same, with a norm that changes nothing and a projection whose columns are the logits."""
    ids, drafts, probs, rest = _drafting(platform, seeds, at)
    x, norm = torch.eye(REQUESTS), torch.full((REQUESTS,), REQUESTS**-0.5)  # the rms of a row of eye is n ** -0.5
    rows, scale, weight = (t.to(platform.device) for t in (x, norm, logits[:, 0].T.contiguous()))
    offsets = torch.zeros(VOCAB, dtype=torch.int64, device=platform.device)
    written = ids, drafts, probs
    run_op(platform, way, lambda: ops.gumbel_head(rows, scale, 0.0, weight, offsets, *rest, *written), written)
    return on_host(ids)[:, None], at + 1, DRAFT


def _drafting(
    platform: Platform, seeds: Tensor, at: Tensor
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor, Tensor]]:
    device = platform.device
    ids, drafts = torch.zeros(REQUESTS, dtype=torch.int64), torch.zeros(REQUESTS, 1, dtype=torch.int64)
    temperature, step = torch.full((REQUESTS,), TEMPERATURE), torch.zeros(1, dtype=torch.int64)
    probs = torch.zeros(REQUESTS, 1, VOCAB)
    rest = temperature.to(device), seeds.to(device), at.int().to(device), step.to(device)
    return ids.to(device), drafts.to(device), probs.to(device), rest


def draft_block_gumbel(platform: Platform, way: str, logits: Tensor, seeds: Tensor, at: Tensor) -> Drawing:
    """Draft token j of a block is that of position start + num_sampled + 1 + j."""
    device, counts = platform.device, torch.arange(REQUESTS) % 3 + 1
    drafts = torch.zeros(REQUESTS, logits.shape[1], dtype=torch.int64, device=device)
    probs = torch.zeros(*logits.shape, device=device)
    tensors = logits.flatten(0, 1), torch.full((REQUESTS,), TEMPERATURE), seeds, at, counts.int()
    rows, temperature, there, starts, sampled = (t.to(device) for t in tensors)
    run_op(
        platform,
        way,
        lambda: ops.draft_block_gumbel(rows, None, temperature, there, starts, sampled, drafts, probs),
        [drafts, probs],
    )
    return on_host(drafts), at + counts + 1, DRAFT


def verify_sampled(platform: Platform, way: str, logits: Tensor, seeds: Tensor, at: Tensor) -> Drawing:
    """Without draft tokens, the row at the last token's position decides the token after it."""
    device, k = platform.device, logits.shape[1] - 1
    drafts = torch.full((REQUESTS, k), -1, device=device)
    sampled, counts = torch.zeros(REQUESTS, k + 1, dtype=torch.int64), torch.zeros(REQUESTS, dtype=torch.int32)
    tensors = logits.flatten(0, 1), torch.full((REQUESTS,), TEMPERATURE), seeds, at, sampled, counts
    rows, temperature, there, starts, *written = (t.to(device) for t in tensors)
    run_op(
        platform,
        way,
        lambda: ops.verify_sampled(rows, drafts, None, None, temperature, there, starts, *written),
        written,
    )
    return on_host(written[0])[:, :1], at + 1, RESAMPLE


OPS: dict[str, Callable[[Platform, str, Tensor, Tensor, Tensor], Drawing]] = {
    function.__name__: function for function in (draft_gumbel, gumbel_head, draft_block_gumbel, verify_sampled)
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("op", OPS)
@case(
    "kernels.noise-of-the-position",
    "A sampled token is the one that the noise of its request's seed and its own absolute position picks, the same on "
    "every device.",
    hazard="noise-of-another-position",
    cause="the position that this op takes its noise at, the purpose of the noise, or the hash in 64-bit arithmetic",
)
def test_noise(platform: Platform, way: str, op: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(REQUESTS, 3, VOCAB, generator=generator)
    seeds = torch.randint(-(1 << 62), 1 << 62, (REQUESTS,), generator=generator)
    at = torch.randint(1, 5000, (REQUESTS,), generator=generator)
    tokens, first, purpose = OPS[op](platform, way, logits, seeds, at)
    wrong = 0
    shown = ""
    for r in range(REQUESTS):
        for j, token in enumerate(tokens[r].tolist()):
            wanted, lead = drawn(logits[r, j], int(seeds[r]), int(first[r]) + j, purpose)
            if token != wanted and lead > 1e-3:  # else rounding may decide
                wrong += 1
                shown = shown or f"the first at row {j} of request {r}: {token} instead of {wanted}"
    assert not wrong, (
        f"{wrong} of {tokens.numel()} tokens of {op} are not those that the noise of seed and position picks, {shown}"
    )


@case(
    "kernels.noise-is-splitmix64",
    "The uniform numbers of a seed, a position and a purpose are those of SplitMix64 in 64-bit integers, bit for bit.",
    hazard="noise-of-another-position",
    cause="multiplications or shifts of 64-bit integers on this device, or a constant of the hash",
    quick=True,
)
def test_uniform(platform: Platform, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    seeds = torch.randint(-(1 << 62), 1 << 62, (30,), generator=generator)
    positions = torch.randint(0, 1 << 20, (30,), generator=generator)
    for purpose in (DRAFT, ACCEPT, RESAMPLE):
        there = seeds.to(platform.device), positions.to(platform.device)
        seen = on_host(noise.uniform(*there, purpose, 5)).double()
        for r in range(30):
            wanted = uniform(int(seeds[r]), int(positions[r]), purpose, 5)
            assert seen[r].tolist() == wanted, f"seed {seeds[r]}, position {positions[r]}, purpose {purpose}"
