"""Copies, synchronize, memory figures, reproducible matmuls, close."""

from __future__ import annotations

import gc

import pytest
import torch
from specgraph.device import Discovered, Platform
from specgraph.errors import SpecgraphError

from specgraph_conformance.case import case
from specgraph_conformance.rig import expect_equal, on_host

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=[str(dtype).removeprefix("torch.") for dtype in DTYPES])
@case(
    "device.copies-round-trip",
    "A tensor copied to the device and back has the same bits.",
    cause="the device or its copy engine doesn't take this dtype",
    quick=True,
)
def test_round_trip(platform: Platform, dtype: torch.dtype) -> None:
    x = torch.arange(-300, 300).to(dtype)
    y = x.to(platform.device)
    assert y.device == platform.device
    expect_equal(on_host(y), x)
    expect_equal(on_host(y.clone()), x)


@case(
    "device.memory-figures-agree",
    "allocated <= reserved <= total and free <= total (where total is known), in bytes.",
    cause="MemoryInfo mixes units or counters, or free counts what other processes hold",
    quick=True,
)
def test_memory(platform: Platform) -> None:
    memory = platform.memory()
    assert 0 <= memory.allocated <= memory.reserved
    assert memory.total == 0 or memory.reserved <= memory.total
    assert memory.free >= 0
    assert memory.total == 0 or memory.free <= memory.total


@case(
    "device.memory-counts-graph-pools",
    "`reserved` includes what a captured graph holds, also after the tensors of the capture are dropped.",
    hazard="reserved-is-allocated",
    cause="memory() leaves graph pools out, or reports the bytes of living tensors as reserved",
)
def test_pool_memory(platform: Platform) -> None:
    x = torch.ones(1 << 20, device=platform.device)
    platform.synchronize()
    before = platform.memory()
    graph = platform.graph()
    kept = []
    with graph.capture():
        for i in range(8):  # 32 MiB: more than an allocator holds unused
            kept.append(x * i)
    held = platform.memory().reserved - before.reserved
    assert held >= 16 << 20, f"reserved grew by {held} bytes while a graph with 32 MiB of tensors was captured"
    kept.clear()
    gc.collect()
    after = platform.memory()
    assert after.reserved >= before.reserved + (16 << 20), (
        f"reserved is {after.reserved - before.reserved} bytes more than before the capture; the live graph still "
        f"writes 32 MiB (allocated is {after.allocated - before.allocated} bytes more)"
    )


@case(
    "device.dropped-tensors-give-memory-back",
    "allocated doesn't grow over rounds that allocate and drop the same tensors.",
    cause="the platform keeps references to what passes through it",
)
def test_dropped(platform: Platform) -> None:
    def once() -> int:
        x = torch.ones(1 << 18, device=platform.device)
        (x * 2).sum()
        platform.synchronize()
        del x
        gc.collect()
        return platform.memory().allocated

    settled = once()
    assert max(once() for _ in range(5)) <= settled


@case(
    "device.same-work-same-bits",
    "The same matmul of the same shape gives the same bits each time.",
    hazard=None,
    cause="a kernel that sums in a changing order: choose deterministic algorithms",
    quick=True,
)
def test_bits(platform: Platform, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(24, 512, generator=generator).to(platform.device)
    w = torch.randn(1024, 512, generator=generator).to(platform.device)
    first = on_host(x @ w.T)
    for _ in range(5):
        expect_equal(on_host(x @ w.T), first)


@case(
    "device.float32-is-float32",
    "A float32 matmul is as close to float64 as float32 can be.",
    cause="the device runs float32 matmuls in a narrower format by default",
)
def test_precision(platform: Platform, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, w = torch.randn(8, 512, generator=generator), torch.randn(256, 512, generator=generator)
    seen = on_host(x.to(platform.device) @ w.to(platform.device).T).double()
    assert (seen - x.double() @ w.double().T).abs().max() < 1e-3


@case(
    "device.closed-platform-refuses",
    "A closed platform refuses new graphs, and closing twice is harmless.",
    cause="close() leaves no mark, or frees twice",
    quick=True,
)
def test_close(backend: Discovered) -> None:
    assert backend.backend is not None
    other = backend.backend.open(0)
    other.close()
    other.close()
    with pytest.raises(SpecgraphError):
        other.graph()
