"""The noise of the Triton kernels: uniform numbers bit for bit those of the reference, exponential ones to 2^-20.

With TRITON_INTERPRET=1 also without a GPU.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import pytest
import torch
from interpreted import DEVICE, device
from specgraph_conformance.noise_oracles import RESAMPLE, seed_that_draws

from specgraph.kernels.noise import exponential, noise_key, uniform
from specgraph.ops import noise

__all__ = ["device"]  # the fixture

triton, tl = pytest.importorskip("triton"), pytest.importorskip("triton.language")

SEEDS = 1024


@triton.jit
def draw_kernel(seeds, uniforms, exponentials, position, SEEDS: tl.constexpr):
    row, column = tl.arange(0, SEEDS), tl.arange(0, 4)
    key = noise_key(tl.load(seeds + row), tl.full((SEEDS,), position, tl.int64), 3)[:, None]
    to = row[:, None] * 4 + column[None, :]
    tl.store(uniforms + to, uniform(key, column[None, :]))
    tl.store(exponentials + to, exponential(key, column[None, :]))


def test_numbers_of_every_size() -> None:
    """One number of each seed is chosen: 2^-63 to 1, more of them above 2^-8, where a series ends."""
    sizes = [*(63 - part * 8 / 900 for part in range(900)), *(55 - part * 55 / 121 for part in range(122))]
    numbers = [(1 << 63) - 1, (1 << 62) + (1 << 38) + 1, *(int(2**size) - 1 | 1 for size in sizes)]
    seeds = torch.tensor([seed_that_draws(number, 9, RESAMPLE, 1) for number in numbers])
    uniforms, exponentials = torch.empty(2, SEEDS, 4, device=DEVICE)
    draw_kernel[(1,)](seeds.to(DEVICE), uniforms, exponentials, 9, SEEDS=SEEDS)
    assert torch.equal(uniforms.cpu(), noise.uniform(seeds, torch.tensor(9), RESAMPLE, 4))
    wanted = -torch.log1p(-uniforms.cpu().double())
    torch.testing.assert_close(exponentials.cpu().double(), wanted, rtol=2.0**-20, atol=0.0)
    reference = -noise.gumbel(seeds, torch.tensor(9), RESAMPLE, 4).double()
    torch.testing.assert_close(reference, wanted.log(), rtol=0.0, atol=5e-6)  # 43 is rounded to 4e-6
