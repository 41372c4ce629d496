"""The noise of the sampling ops, against 64-bit arithmetic in Python integers and logarithms in float64."""

from __future__ import annotations

import math

import torch
from specgraph.device import Platform
from specgraph.ops import noise

from specgraph_conformance.case import case
from specgraph_conformance.noise_oracles import ACCEPT, DRAFT, RESAMPLE, nearest, seed_that_draws, uniform
from specgraph_conformance.rig import on_host


@case(
    "kernels.noise-is-splitmix64",
    "The uniform numbers of a seed, a position and a purpose are those of SplitMix64 in 64-bit integers, bit for bit; "
    "the Gumbel noise of small ones too is float64's.",
    hazard="noise-of-another-position",
    cause="multiplications, shifts or the rounding of 64-bit integers on this device, a constant of the hash, or a "
    "log1p that is the logarithm of 1 + x",
    quick=True,
)
def test_uniform(platform: Platform, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    seeds = torch.randint(-(1 << 63), (1 << 63) - 1, (30,), generator=generator)
    positions = torch.randint(0, 1 << 20, (30,), generator=generator)
    positions[-5:] = torch.randint(1 << 20, 1 << 40, (5,), generator=generator) | 1
    for purpose in (DRAFT, ACCEPT, RESAMPLE):
        there = seeds.to(platform.device), positions.to(platform.device)
        seen = on_host(noise.uniform(*there, purpose, 5)).double()
        for r in range(30):
            wanted = uniform(int(seeds[r]), int(positions[r]), purpose, 5)
            assert seen[r].tolist() == wanted, f"seed {seeds[r]}, position {positions[r]}, purpose {purpose}"
    # One that would round otherwise by way of float64, then random ones of every size.
    numbers = [(1 << 62) + (1 << 38) + 1]
    numbers += [int(torch.randint(1 << 61, 1 << 62, (), generator=generator)) >> shift | 1 for shift in range(62)]
    at = torch.tensor(9, device=platform.device)
    chosen = torch.tensor([seed_that_draws(number, 9, RESAMPLE, 1) for number in numbers], device=platform.device)
    uniforms, gumbels = (on_host(of(chosen, at, RESAMPLE, 2))[:, 1].tolist() for of in (noise.uniform, noise.gumbel))
    for number, u, gumbel in zip(numbers, uniforms, gumbels, strict=True):
        assert u == nearest(number), f"{number} / 2^63 is rounded to {u!r}"
        assert abs(gumbel + math.log(-math.log1p(-u))) < 1e-5, f"the Gumbel noise of {u!r} is {gumbel!r}"
