"""The uniform numbers of the sampling ops, against 64-bit arithmetic in Python integers."""

from __future__ import annotations

import torch
from specgraph.device import Platform
from specgraph.ops import noise

from specgraph_conformance.case import case
from specgraph_conformance.noise_oracles import ACCEPT, DRAFT, RESAMPLE, uniform
from specgraph_conformance.rig import on_host


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
