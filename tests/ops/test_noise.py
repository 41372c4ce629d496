"""The counter-based noise: uniform, independent where it must be, and as precise for unlikely tokens as for likely."""

from __future__ import annotations

import math
import random
from functools import partial

import numpy as np
import pytest
import torch
from goodness_of_fit import follows, independent
from hypothesis import given
from hypothesis import strategies as st
from specgraph_conformance.noise_oracles import nearest, seed_that_draws, uniform
from specgraph_run.decoder import ops as decoder_ops
from torch import Tensor

from specgraph import ops
from specgraph.ops import noise

PURPOSES = (noise.DRAFT, noise.ACCEPT, noise.RESAMPLE)
ANY_SEED = st.integers(-(2**63), 2**63 - 1)


@given(ANY_SEED, st.integers(0, 2**20), st.sampled_from(PURPOSES), st.integers(1, 5))
def test_against_python_integers(seed, position, purpose, count):
    got = noise.uniform(torch.tensor([seed]), torch.tensor([position]), purpose, count)
    assert got.tolist() == [uniform(seed, position, purpose, count)]
    assert got.dtype == torch.float32


def draw_number(number: int, position: int, purpose: int, index: int) -> tuple[float, float]:
    """The uniform number and the Gumbel noise of the seed whose 63 bits are `number`."""
    seed = torch.tensor([seed_that_draws(number, position, purpose, index)])
    arguments = (seed, torch.tensor([position]), purpose, index + 1)
    return float(noise.uniform(*arguments)[0, index]), float(noise.gumbel(*arguments)[0, index])


@given(st.integers(0, 63), st.integers(0, 2**62), st.integers(0, 2**20), st.sampled_from(PURPOSES), st.integers(0, 9))
def test_small_numbers_keep_their_relative_precision(size, bits, position, purpose, index):
    number = (bits & ((1 << size) - 1)) | 1
    u, gumbel = draw_number(number, position, purpose, index)
    assert abs(int(u * 2**63) - number) <= number / 2**24
    exact = number / 2**63
    if exact < 1 - 2.0**-16:
        # 43 is rounded to 4e-6; of a number next to 1 what is left below 1 is a multiple of 2^-24.
        assert abs(gumbel + math.log(-math.log1p(-exact))) <= 5e-6 + 2.0**-24 / (1 - exact)


@pytest.mark.parametrize(
    ("number", "wanted"),
    [
        (1, 2.0**-63),
        ((1 << 62) + (1 << 38) + 1, 0.5 + 2.0**-24),  # rounded to float64 first it would be a tie, and 0.5
        ((1 << 24) + 1, 2.0**-39),  # a tie
        ((1 << 24) + 3, 2.0**-39 + 2.0**-61),
        ((1 << 63) - (1 << 38) + 1, 1 - 2.0**-24),  # 1, to nearest
        ((1 << 63) - 1, 1 - 2.0**-24),
    ],
)
def test_integers_are_rounded_once_and_stay_inside(number, wanted):
    u, gumbel = draw_number(number, 17, noise.DRAFT, 3)
    assert u == wanted == nearest(number)
    assert math.isfinite(gumbel)


@given(ANY_SEED, st.integers(0, 2**20), st.sampled_from(PURPOSES))
def test_no_bit_of_a_seed_is_lost(seed, position, purpose):
    seeds = [seed, *(((seed ^ (1 << bit)) + 2**63) % 2**64 - 2**63 for bit in range(64))]
    numbers = noise.uniform(torch.tensor(seeds), torch.tensor(position), purpose, 2)
    assert len(numbers.unique(dim=0)) == 65


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
    order, steps = u.double().sort().values, torch.arange(n + 1) / n
    distance = max(float((steps[1:] - order).max()), float((order - steps[:-1]).max()))
    assert distance * n**0.5 < 1.95  # what Kolmogorov's test of a uniform sample passes at 1e-3
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


def test_gumbel_samples_the_softmax():
    logits = torch.tensor([1.0, -0.5, 0.3, 2.0, -3.0])
    n = 40_000
    keys = logits + noise.gumbel(torch.full((n,), 11), torch.arange(n), noise.DRAFT, 5)
    counts = torch.bincount(keys.argmax(dim=1), minlength=5)
    assert follows(counts, torch.softmax(logits, 0))
    assert not follows(counts, torch.softmax(logits * 1.05, 0))


def draft_token_1(logits: Tensor, seeds: Tensor) -> Tensor:
    """Return whether each draft is token 1."""
    tokens, probs, at = torch.zeros(len(seeds), 1).long(), torch.empty(len(seeds), 1, 2), torch.full_like(seeds, 8)
    ops.draft_from_logits(logits, ops.Drafts(tokens), ops.Draws(torch.ones(len(seeds)), seeds, at, None, probs))
    return tokens[:, 0] == 1


def verify_token(draft: int, logits: Tensor, seeds: Tensor) -> Tensor:
    """Return whether a verify gives token 1 at position 9 where a greedy drafter said `draft` (-1: nothing)."""
    sampled = decoder_ops.Sampled(torch.empty(len(seeds), 2).long(), torch.empty(len(seeds)).int())
    at, drafts = torch.full_like(seeds, 8), torch.full((len(seeds), 1), draft)
    acceptance = decoder_ops.Acceptance(torch.ones(len(seeds)), seeds)
    decoder_ops.verify_drafts(logits.repeat_interleave(2, 0), drafts, at, acceptance, sampled)
    return sampled.token_ids[:, 0] == 1


@pytest.mark.parametrize("depth", [12, 16, 18, 20, 22, 24])
@pytest.mark.parametrize(
    ("draws", "purpose", "index"),
    [
        pytest.param(draft_token_1, noise.DRAFT, 1, id="drafted"),
        pytest.param(partial(verify_token, -1), noise.RESAMPLE, 1, id="sampled"),
        pytest.param(partial(verify_token, 1), noise.ACCEPT, 0, id="accepted"),
    ],
)
def test_a_token_far_below_the_best_is_as_likely_as_the_softmax_says(depth, draws, purpose, index):
    """Only draws count whose number for token 1 is below a bound, 40 to 80 times the token's probability. The others,
    1 - bound of all, cannot give it: the best token's exponential noise would be above 40."""
    n, size = 3000, math.ceil(math.log2(40 * math.exp(-depth))) + 63
    bits = random.Random(depth)
    seeds = torch.tensor([seed_that_draws(bits.getrandbits(size) | 1, 9, purpose, index) for _ in range(n)])
    count = int(draws(torch.tensor([[0.0, -depth]]).expand(n, 2).contiguous(), seeds).sum())
    share = 2.0 ** (63 - size) / (1 + math.exp(depth))
    assert follows([count, n - count], [share, 1 - share])
