"""Copies, synchronize, memory figures, the torch ops that models run on the device, and close."""

from __future__ import annotations

import gc

import pytest
import torch
from specgraph.device import Discovered, GraphPool, Platform
from specgraph.errors import SpecgraphError

from specgraph_conformance.case import case
from specgraph_conformance.rig import captured, expect_equal, on_host, replay_and_wait

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
        for i in range(8):  # 32 MiB, more than an allocator keeps unused
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


@case(
    "replay.closing-frees-what-is-counted",
    "Memory of graphs counts as allocated while they live and not after, also where their pool was closed before them.",
    hazard="pool-closed-before-its-graphs",
    cause="a count that only grows, a pool that gives nothing back once it is closed, or memory of graphs that was "
    "handed to somebody else while they lived",
)
def test_counts(platform: Platform) -> None:
    x, pools = torch.ones(1 << 20, device=platform.device), list[GraphPool]()

    def once(pool_first: bool) -> tuple[int, int]:
        pool, kept = platform.graph_pool(), list[torch.Tensor]()
        graph = captured(platform, lambda: kept.append(x * 2), pool)
        replay_and_wait(platform, graph)
        kept.clear()
        closes = (pool.close, graph.close) if pool_first else (graph.close, pool.close)
        closes[0]()
        closes[1]()
        pools.append(pool)  # a closed pool holds no memory, even while the pool object lives
        del graph, closes
        gc.collect()
        return platform.memory().allocated, platform.memory().reserved

    once(False)
    allocated, reserved = once(False)
    for pool_first in (True, False, True, True):
        now = once(pool_first)
        assert now[0] <= allocated, f"{now[0] - allocated} bytes more are allocated after a graph came and went"
        assert now[1] <= reserved, f"{now[1] - reserved} bytes more are reserved after a graph came and went"


@case(
    "device.sums-of-half-precision",
    "Sums, means, norms, softmax and matmuls over 4,096 values in half precision are float64's, rounded once.",
    hazard="sums-in-half",
    cause="a sum that is kept in the dtype of its terms: in bfloat16 it stops growing at 256 terms",
)
def test_sums(platform: Platform, seed: int) -> None:
    n = 4096
    values = torch.rand(3, n, generator=torch.Generator().manual_seed(seed)) + 0.5
    for dtype in (torch.bfloat16, torch.float16):
        x = (values / 8).to(dtype)
        there, wide = x.to(platform.device), x.double()
        for name, seen, wanted in (
            ("sum", there.sum(-1), wide.sum(-1)),
            ("mean", there.mean(-1), wide.mean(-1)),
            ("sum of squares", there.square().sum(-1), x.square().double().sum(-1)),
            ("rms_norm", torch.rms_norm(there, (n,), None, 1e-6), wide * (wide.square().mean(-1, True) + 1e-6).rsqrt()),
            ("softmax", there.softmax(-1) * n, wide.softmax(-1) * n),
            ("matmul", there @ there.T, wide @ wide.T),
        ):
            error = ((on_host(seen).double() - wanted).abs() / wanted.abs()).max()
            limit = 4 * torch.finfo(dtype).eps
            assert error < limit, f"{name} of 4,096 values in {dtype} is off by {error:.1%}, by more than {limit:.1%}"


@case(
    "device.sort-keeps-equals-in-order",
    "A stable sort leaves equal values in their order in both directions, argmax takes the first of them, and topk "
    "gives the largest values, the largest first.",
    hazard="order-of-equals",
    cause="sort() that passes over `stable`, argmax over blocks that takes the last, or topk in the order of places",
)
def test_order(platform: Platform, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for size in (7, 300, 5000):
        values = torch.randint(0, 5, (4, size), generator=generator).float()
        there = values.to(platform.device)
        for descending in (False, True):
            ordered, order = there.sort(dim=-1, descending=descending, stable=True)
            for row in range(4):
                sign = -1 if descending else 1
                wanted = sorted(range(size), key=lambda i, row=row, sign=sign: sign * float(values[row, i]))
                assert on_host(order)[row].tolist() == wanted, f"a stable sort of {size} values exchanges equal ones"
                assert on_host(ordered)[row].tolist() == values[row][wanted].tolist()
        first = [row.index(max(row)) for row in values.tolist()]
        assert on_host(there.argmax(-1)).tolist() == first, f"argmax of {size} values does not take the first of equals"
        top, places = there.topk(5, dim=-1)
        wanted = [sorted(row, reverse=True)[:5] for row in values.tolist()]
        assert on_host(top).tolist() == wanted, f"topk of {size} values gives others, or in another order"
        assert values.gather(1, on_host(places)).tolist() == wanted, "places of topk are not those of its values"
        assert all(len(set(row)) == 5 for row in on_host(places).tolist()), "topk gives a place twice"
