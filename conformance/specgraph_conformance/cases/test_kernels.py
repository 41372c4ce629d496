"""The noise of the sampling ops, the rows of the op table, and collectives of one rank, on the device under test."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from specgraph import ops
from specgraph.device import Platform
from specgraph.ops import noise
from specgraph_models.parallel import Ranks
from torch import Tensor

from specgraph_conformance.case import MARKER, case
from specgraph_conformance.noise_oracles import ACCEPT, DRAFT, RESAMPLE, nearest, seed_that_draws, uniform
from specgraph_conformance.op_rows import ROWS
from specgraph_conformance.op_run import RunInGraph
from specgraph_conformance.op_table import Row
from specgraph_conformance.rig import expect_equal, on_host


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
    # A number that is rounded wrongly if it goes through float64, then random numbers of all sizes.
    numbers = [(1 << 62) + (1 << 38) + 1]
    numbers += [int(torch.randint(1 << 61, 1 << 62, (), generator=generator)) >> shift | 1 for shift in range(62)]
    at = torch.tensor(9, device=platform.device)
    chosen = torch.tensor([seed_that_draws(number, 9, RESAMPLE, 1) for number in numbers], device=platform.device)
    uniforms, gumbels = (on_host(of(chosen, at, RESAMPLE, 2))[:, 1].tolist() for of in (noise.uniform, noise.gumbel))
    for number, u, gumbel in zip(numbers, uniforms, gumbels, strict=True):
        assert u == nearest(number), f"{number} / 2^63 is rounded to {u!r}"
        assert abs(gumbel + math.log(-math.log1p(-u))) < 1e-5, f"the Gumbel noise of {u!r} is {gumbel!r}"


@case(
    "kernels.collectives-of-one",
    "One rank: all_reduce leaves its tensor as it is, all_gather gives a copy.",
    hazard="merged-chain-collectives",
    cause="all_reduce or all_gather: an uninitialised result, or the input itself instead of a copy",
    needs=("collectives_in_graph",),
)
def test_one_rank(platform: Platform, ranks: Ranks, seed: int) -> None:
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(seed))
    given, total, copy = (x.clone() for _ in range(3))

    def body(there: Tensor, total: Tensor, copy: Tensor) -> None:
        total.copy_(there)
        ops.all_reduce(total, ranks.name)
        copy.copy_(ops.all_gather(there, ranks.name, 1))

    RunInGraph(platform)(body, given, total, copy, written=(total, copy))
    expect_equal(total, x)
    expect_equal(copy, x)


def case_of(row: Row) -> Callable[..., None]:
    """Return a test function that runs a row once per parameter set. Its failures begin with the place to look
    first."""

    def test(platform: Platform, seed: int, parameters: dict[str, Any]) -> None:
        run = RunInGraph(platform)
        try:
            row.check(run, torch.Generator().manual_seed(seed), **parameters)
        except AssertionError as error:
            place = run.differs or "at once as in a replay: look at the op, not at the graph"
            error.args = (f"{error} ({place})",)
            raise
        if run.differs:
            pytest.fail(f"{run.differs}; the replay's are right: look at work of a side stream, and waits for it")

    def test_only_set(platform: Platform, seed: int) -> None:
        test(platform, seed, {})

    sets = [pytest.param(parameters, id=id) for id, parameters in row.parameter_sets()]
    collected = pytest.mark.parametrize("parameters", sets)(test) if row.parameters else test_only_set
    return getattr(pytest.mark, MARKER)(row.case)(collected)


globals().update({f"test_{row.case.id}": case_of(row) for row in ROWS})
