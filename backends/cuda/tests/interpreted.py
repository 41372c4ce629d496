"""Tests of Triton kernels run on a GPU, or without one in Triton's interpreter (TRITON_INTERPRET=1); and the comparison
of an op with its reference.

A module that imports this one is skipped if Triton is not installed.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

pytest.importorskip("triton")

from launched import Launched

from specgraph.kernels.launch import LaunchOptions
from specgraph.ops.library import declared

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


def ops() -> Any:
    """The ops under test: the registered ops on a GPU, else the same kernels interpreted."""
    return Launched(LaunchOptions(float8=True)) if INTERPRETED else SimpleNamespace(**declared())


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest) -> str:
    """The type of the device; skips where it is a GPU and there is none. A module that imports it uses it."""
    if not INTERPRETED:
        request.getfixturevalue("platform")
    return DEVICE


def run(name: str, *arguments: object, written: dict[str, Tensor], **options: object) -> dict[str, Tensor]:
    """Run one op of the device on copies of the tensors, which are on the CPU; what it wrote, on the CPU."""
    there = {key: value.clone().to(DEVICE) for key, value in written.items()}
    getattr(ops(), name)(*(a.to(DEVICE) if isinstance(a, Tensor) else a for a in arguments), **options, **there)
    return {key: value.cpu() for key, value in there.items()}


def expect_same(name: str, *arguments: object, **options: object) -> Any:
    """Run one op of the device and its reference on copies of the arguments, and compare all tensors: integers exactly,
    float32 to its rounding. Return the reference's arguments."""
    there = tree_map_only(Tensor, lambda t: t.clone().to(DEVICE), arguments)
    here = tree_map_only(Tensor, Tensor.clone, arguments)
    getattr(ops(), name)(*there, **options)
    declared()[name].reference(*here, **options)
    for seen, wanted in zip(tree_leaves(there), tree_leaves(here), strict=True):
        if isinstance(wanted, Tensor):
            torch.testing.assert_close(seen.cpu(), wanted, rtol=1e-5, atol=1e-5)
    return here


def expect(name: str, *arguments: object, written: dict[str, Tensor], **options: object) -> dict[str, Tensor]:
    """Compare with the reference: integers exactly, float32 to its rounding."""
    seen = run(name, *arguments, written=written, **options)
    there = {key: value.clone() for key, value in written.items()}
    declared()[name].reference(*arguments, **options, **there)
    for key, value in there.items():
        torch.testing.assert_close(seen[key], value, rtol=1e-5, atol=1e-5, msg=lambda m, key=key: f"{key}: {m}")
    return there
