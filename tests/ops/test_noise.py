"""The counter-based noise: uniform, independent where it must be, and never a value that a logarithm can't take."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from goodness_of_fit import follows, independent
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kstest

from specgraph.ops import noise

PURPOSES = (noise.DRAFT, noise.ACCEPT, noise.RESAMPLE)
MASK = (1 << 64) - 1


def splitmix(x: int) -> int:
    """The finaliser of SplitMix64, on unsigned Python integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def naive_uniform(seed: int, position: int, purpose: int, index: int) -> float:
    golden = 0x9E3779B97F4A7C15
    key = splitmix((splitmix((seed * 4 + purpose) & MASK) + position * golden) & MASK)
    return ((splitmix((key + (index + 1) * golden) & MASK) >> 41) + 0.5) * 2.0**-23


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**20), st.sampled_from(PURPOSES), st.integers(1, 5))
def test_against_python_integers(seed, position, purpose, count):
    got = noise.uniform(torch.tensor([seed]), torch.tensor([position]), purpose, count)
    assert got.tolist() == [[naive_uniform(seed, position, purpose, i) for i in range(count)]]
    assert got.dtype == torch.float32


@pytest.mark.parametrize("purpose", PURPOSES)
@pytest.mark.parametrize("axis", ["seeds", "positions", "index"])
def test_uniform_along_each_axis(purpose, axis):
    n = 50_000
    line, zero = torch.arange(n), torch.zeros(n, dtype=torch.int64)
    if axis == "index":
        u = noise.uniform(torch.tensor([3]), torch.tensor([17]), purpose, n)[0]
    else:
        u = noise.uniform(*((line, zero) if axis == "seeds" else (zero, line)), purpose, 1)[:, 0]
    assert float(u.min()) > 0
    assert float(u.max()) < 1
    assert kstest(u.numpy(), "uniform").pvalue > 1e-3
    cells = np.bincount((u.numpy()[:-1] * 8).astype(int) * 8 + (u.numpy()[1:] * 8).astype(int), minlength=64)
    assert follows(cells, np.full(64, 1 / 64))  # neighbours know nothing of each other


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((0, noise.DRAFT), (0, noise.ACCEPT)),
        ((0, noise.DRAFT), (0, noise.RESAMPLE)),
        ((0, noise.ACCEPT), (0, noise.RESAMPLE)),
        ((0, noise.DRAFT), (1, noise.DRAFT)),
        ((0, noise.RESAMPLE), (1, noise.RESAMPLE)),
    ],
)
@pytest.mark.parametrize("axis", ["positions", "seeds"])
def test_purposes_positions_and_seeds_are_independent(a, b, axis):
    """Accepting with the noise that drew the draft would bias the output."""
    n = 40_000

    def draw(shift: int, purpose: int) -> np.ndarray:
        line, zero = torch.arange(n) * 3 + shift, torch.zeros(n, dtype=torch.int64)
        return noise.uniform(*((zero, line) if axis == "positions" else (line, zero)), purpose, 1)[:, 0].numpy()

    table = np.histogram2d(draw(*a), draw(*b), bins=8, range=[[0, 1], [0, 1]])[0]
    assert independent(table)
    assert not independent(np.histogram2d(draw(*a), draw(*a), bins=8, range=[[0, 1], [0, 1]])[0])


def test_the_extreme_bits_stay_inside():
    smallest, largest = torch.tensor([0.5]) * 2.0**-23, (torch.tensor([2.0**23 - 1]) + 0.5) * 2.0**-23
    for u in (smallest, largest):
        assert 0 < float(u) < 1
        assert math.isfinite(float(-torch.log(-torch.log(u))))


def test_gumbel_samples_the_softmax():
    logits = torch.tensor([1.0, -0.5, 0.3, 2.0, -3.0])
    n = 40_000
    keys = logits + noise.gumbel(torch.full((n,), 11), torch.arange(n), noise.DRAFT, 5)
    counts = torch.bincount(keys.argmax(dim=1), minlength=5)
    assert follows(counts, torch.softmax(logits, 0))
    assert not follows(counts, torch.softmax(logits * 1.05, 0))
