"""Sampling parameters on the device, bit for bit those of the plain torch reference on the CPU.

With TRITON_INTERPRET=1 also without a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from interpreted import DEVICE, INTERPRETED, device, ops
from specgraph_run.decoder import ops as kernels
from specgraph_run.decoder.kernels import sampling_parameters
from torch import Tensor
from torch.utils._pytree import tree_map_only

__all__ = ["device"]  # the fixture

FILTERS = [
    {"top_k": 1}, {"top_k": 7}, {"top_p": 0.9}, {"top_p": 0.3, "top_k": 40}, {"min_p": 0.05}, {}, {"top_k": 100000},
    {"top_p": 0.0}, {"top_p": 0.999, "min_p": 0.001}, {"top_k": 300, "top_p": 0.97}, {"top_p": 0.9, "temperature": 0.0},
    {"top_k": 3, "temperature": 0.01}, {"min_p": 1.0, "top_p": 0.5}, {"top_p": 0.5, "temperature": 30.0},
]  # fmt: skip
"""Per request; the requests of a batch take them in turn."""


class Arguments(NamedTuple):
    """Arguments of `adjust_logits`."""

    logits: Tensor
    temperature: Tensor
    parameters: kernels.SamplingParameters
    draft_token_ids: Tensor
    ancestors: Tensor | None = None
    draft_to_target: Tensor | None = None


def batch(requests: int, steps: int, vocab: int, drafted: int | None, logits: Tensor, seed: int) -> Arguments:
    """Penalties, bias and filters mixed, requests without any among them."""
    g = torch.Generator().manual_seed(seed)

    def column(name: str, default: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor([FILTERS[(row + seed) % len(FILTERS)].get(name, default) for row in range(requests)]).to(
            dtype
        )

    def some(*values: float) -> Tensor:
        return torch.tensor(values)[torch.randint(0, len(values), (requests,), generator=g)]

    offsets = None
    if drafted is not None:
        offsets = torch.randperm(vocab, generator=g)[:drafted].sort().values - torch.arange(drafted)
    bias = torch.randn(requests, vocab, generator=g) * (torch.rand(requests, vocab, generator=g) < 0.1)
    counts = torch.randint(0, 3, (requests, vocab), generator=g, dtype=torch.int32)
    drafts = torch.randint(-1, min(vocab, 9), (requests, steps), generator=g)
    parameters = kernels.SamplingParameters(
        column("top_k", 0, torch.int64), column("top_p", 1.0), column("min_p", 0.0), some(1.0, 1.3, 0.8),
        some(0.0, 0.6, -0.4), some(0.0, 0.25, -0.1), bias, counts, torch.rand(requests, vocab, generator=g) < 0.3,
    )  # fmt: skip
    return Arguments(logits, column("temperature", 0.7), parameters, drafts, None, offsets)


def check(arguments: Arguments) -> None:
    wanted = kernels.adjust_logits.reference(*arguments)
    got = ops().adjust_logits(*tree_map_only(Tensor, lambda t: t.to(DEVICE), arguments)).cpu()
    different = (got != wanted).nonzero()
    assert not len(different), (different[:5], got[tuple(different[0])], wanted[tuple(different[0])])


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("normal", torch.float32), ("ties", torch.bfloat16), ("one token", torch.bfloat16), ("flat", torch.float32),
     ("equal", torch.float32)],
)  # fmt: skip
@pytest.mark.parametrize(("vocab", "steps"), [(7, 1), (300, 0)] if not INTERPRETED else [(300, 0)])
def test_the_reference_keeps_the_same_tokens(kind, vocab, steps, dtype, monkeypatch) -> None:
    monkeypatch.setattr(sampling_parameters, "_COLUMNS", 64)  # two or more blocks of the larger vocabulary
    requests = len(FILTERS)
    g = torch.Generator().manual_seed(vocab)
    rows = requests * (steps + 1)
    logits = torch.randn(rows, vocab, generator=g)
    if kind == "normal":
        logits *= 3
    elif kind == "ties":
        logits = (logits * 2).round()
    elif kind == "one token":
        logits[torch.arange(rows), torch.randint(0, vocab, (rows,), generator=g)] += 40
    elif kind == "flat":
        logits *= 0.01
    else:
        logits.zero_()
    arguments = batch(requests, steps, vocab, None, logits.to(dtype), seed=3)
    if kind in ("ties", "equal"):  # as many ties as before: no bias, whole penalties
        ones, zeros = torch.ones(requests), torch.zeros(requests)
        whole = {"repetition_penalty": ones, "presence_penalty": ones, "frequency_penalty": zeros}
        parameters = arguments.parameters._replace(bias=torch.zeros(requests, vocab), **whole)
        arguments = arguments._replace(parameters=parameters)
    check(arguments)


@pytest.mark.parametrize("seed", range(2))
def test_in_chains_in_trees_and_for_drafts(seed) -> None:
    g = torch.Generator().manual_seed(seed)
    requests, steps = 3, 3
    tree = batch(requests, steps, 300, None, torch.randn(requests * (steps + 1), 300, generator=g) * 2, seed)
    check(tree)
    check(tree._replace(ancestors=torch.randint(0, 1 << (steps + 1), (requests * (steps + 1),), generator=g)))
    draft = batch(requests, steps, 300, 120, torch.randn(requests * 2, 120, generator=g) * 2, seed)
    check(draft._replace(ancestors=torch.full((requests * 2,), -1)))


@pytest.mark.skipif(INTERPRETED, reason="large")
@pytest.mark.parametrize("temperature", [1.0, 5.0])
def test_of_a_real_vocabulary(temperature) -> None:
    logits = torch.randn(14 * 6, 128256, generator=torch.Generator().manual_seed(1)) * 3
    arguments = batch(14, 5, 128256, None, logits.bfloat16(), seed=0)
    check(arguments._replace(temperature=torch.full((14,), temperature)))
