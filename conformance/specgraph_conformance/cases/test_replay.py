"""Replay: sees what is in its inputs now, keeps its outputs, and costs no memory."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable

import pytest
import torch
from specgraph.platforms import Graph, Platform
from torch import Tensor
from torch.nn import functional

from specgraph_conformance.case import case
from specgraph_conformance.rig import captured, expect_equal, on_host

ROWS, WIDTH = 6, 64

OPS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    # (x float [ROWS, WIDTH], ids int64 [ROWS] below ROWS, out-of-place buffer like x)
    "linear": lambda x, i, b: x @ b.T,
    "addmm": lambda x, i, b: torch.addmm(x[:, :ROWS], x, b.T),
    "bmm": lambda x, i, b: torch.bmm(x.view(2, 3, WIDTH), b.view(2, 3, WIDTH).transpose(1, 2)),
    "embedding": lambda x, i, b: functional.embedding(i, x),
    "rms-norm": lambda x, i, b: functional.rms_norm(x, (WIDTH,), b[0]),
    "silu-mul": lambda x, i, b: functional.silu(x) * b,
    "softmax": lambda x, i, b: x.softmax(dim=-1),
    "argmax": lambda x, i, b: x.argmax(dim=-1),
    "gather": lambda x, i, b: x.gather(1, i[:, None].expand(ROWS, 4)),
    "index": lambda x, i, b: x[i],
    "index-copy": lambda x, i, b: b.clone().index_copy_(0, i, x),
    "index-put": lambda x, i, b: b.clone().index_put_((i,), x),
    "where": lambda x, i, b: torch.where(x > b, x, b),
    "cumprod": lambda x, i, b: (x > 0).long().cumprod(dim=1),
    "cat-split": lambda x, i, b: torch.cat(torch.cat([x, b], dim=1).split((WIDTH // 2, WIDTH, WIDTH // 2), 1)[::-1], 1),
    "scatter": lambda x, i, b: torch.zeros_like(x).scatter_(1, i[:, None], 1.0),
    "slices": lambda x, i, b: b.clone()[1:4].copy_(x[:3]).sum(dim=0),
    "integers": lambda x, i, b: ((i * 40503 + 7) ^ (i << 3)) & 1023,
    "bfloat16": lambda x, i, b: (x.bfloat16() @ b.bfloat16().T).float(),
    "strided": lambda x, i, b: x.T.contiguous().T + b[:, ::2].repeat_interleave(2, dim=1),
}


def assert_replays(graph: Graph, platform: Platform, x: Tensor, out: Tensor, expected: float) -> None:
    """Replay gives `expected` times x."""
    graph.replay()
    platform.synchronize()
    expect_equal(on_host(out), on_host(x) * expected)


@pytest.mark.parametrize("op", OPS)
@case(
    "replay.op-equals-eager",
    "A replayed op gives the bits that the same op gives eagerly, for inputs written after its capture.",
    hazard="acceptance-hidden",
    cause="this op under capture: another kernel or workspace than eagerly, or baked inputs",
    needs=("graphs",),
    quick=True,
)
def test_ops(platform: Platform, op: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    device = platform.device
    x, b = torch.zeros(ROWS, WIDTH, device=device), torch.zeros(ROWS, WIDTH, device=device)
    ids = torch.zeros(ROWS, dtype=torch.int64, device=device)
    out = torch.zeros_like(OPS[op](x, ids, b))
    graph = captured(platform, lambda: out.copy_(OPS[op](x, ids, b)))
    for _ in range(2):
        x.copy_(torch.randn(ROWS, WIDTH, generator=generator))
        b.copy_(torch.randn(ROWS, WIDTH, generator=generator))
        ids.copy_(torch.randperm(ROWS, generator=generator))
        graph.replay()
        platform.synchronize()
        expect_equal(on_host(out), on_host(OPS[op](x, ids, b)))
    graph.close()


@case(
    "replay.inputs-written-in-place-are-seen",
    "A replay reads what was written into its inputs since the last one.",
    hazard="stale-metadata-copied-late",
    cause="the capture copied its inputs, or replays on a stream that isn't ordered after the write",
    quick=True,
)
def test_in_place(platform: Platform) -> None:
    x, out = torch.zeros(256, device=platform.device), torch.zeros(256, device=platform.device)
    graph = captured(platform, lambda: out.copy_(x * 2))
    for value in (1.0, -3.5, 7.25):
        x.fill_(value)
        assert_replays(graph, platform, x, out, 2.0)
    graph.close()


@case(
    "replay.state-is-carried",
    "What a graph writes in place is there for its next replay.",
    cause="replays restore or copy memory",
    quick=True,
)
def test_state(platform: Platform) -> None:
    count = torch.zeros(1, dtype=torch.int64, device=platform.device)
    graph = captured(platform, lambda: count.add_(1), warm_up=False)
    for _ in range(50):
        graph.replay()
    platform.synchronize()
    assert on_host(count).item() == 50
    graph.close()


@case(
    "replay.outputs-stay-in-place",
    "A tensor made in the capture is where every replay writes its result.",
    cause="the private pool gives the block away after the capture, or replays allocate",
    quick=True,
)
def test_outputs(platform: Platform) -> None:
    x = torch.ones(128, device=platform.device)
    platform.synchronize()
    graph = platform.graph()
    with graph.capture():
        out = x * 3
    address = out.data_ptr()
    for value in (2.0, 5.0):
        x.fill_(value)
        assert_replays(graph, platform, x, out, 3.0)
        assert out.data_ptr() == address
    del out
    graph.close()


@case(
    "replay.repeats-bit-for-bit",
    "Replaying twice with the same inputs gives the same bits.",
    cause="kernels with a changing order of summation, or a workspace that carries something over",
)
def test_repeats(platform: Platform, seed: int) -> None:
    torch.manual_seed(seed)
    x, w = torch.randn(32, 256).to(platform.device), torch.randn(512, 256).to(platform.device)
    out = torch.zeros(32, 512, device=platform.device)
    graph = captured(platform, lambda: out.copy_(functional.silu(x @ w.T).softmax(dim=-1)))
    seen = []
    for _ in range(4):
        graph.replay()
        platform.synchronize()
        seen.append(on_host(out))
    assert all(torch.equal(seen[0], other) for other in seen[1:])
    graph.close()


@case(
    "replay.graphs-interleave-in-one-pool",
    "Graphs that share a pool, captured largest first, replay right in any order.",
    cause="the pool hands memory that one graph still needs in its replay to another",
    needs=("shared_pool",),
)
def test_interleaved(platform: Platform, seed: int) -> None:
    pool = platform.graph_pool()
    rows = [16, 8, 4, 2, 1]
    x, out = torch.zeros(16, WIDTH, device=platform.device), torch.zeros(16, WIDTH, device=platform.device)
    w = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed)).to(platform.device)

    def body(n: int) -> Tensor:
        return torch.tanh(x[:n] @ w) @ w.T + x[:n].sin() * n

    graphs = {n: captured(platform, lambda n=n: out[:n].copy_(body(n)), pool) for n in rows}
    order = random.Random(seed)
    for _ in range(40):
        n = order.choice(rows)
        x.copy_(torch.randn(16, WIDTH))
        graphs[n].replay()
        platform.synchronize()
        expect_equal(on_host(out[:n]), on_host(body(n)))
    for graph in graphs.values():
        graph.close()
    pool.close()


@case(
    "replay.pools-are-separate",
    "The output of a graph survives the replay of a graph in another pool.",
    hazard="pool-clash",
    cause="graph_pool() gives the same pool twice, or graph() without a pool takes a shared one",
    quick=True,
)
def test_pools(platform: Platform) -> None:
    x = torch.ones(4096, device=platform.device)
    platform.synchronize()
    one, other = platform.graph(platform.graph_pool()), platform.graph(platform.graph_pool())
    assert one.pool is not other.pool
    with one.capture():
        kept = (x + 1) * 2
    address = kept.data_ptr()
    result = kept[:1].expand(1)  # a view: the tensor object itself goes, as a vendor's weak reference would have it
    del kept
    with other.capture():
        scratch = [(x * i).exp() for i in range(8)]
        assert address not in {t.data_ptr() for t in scratch}
    one.replay()
    other.replay()
    platform.synchronize()
    assert on_host(result).item() == 4.0
    del scratch, result
    one.close()
    other.close()


@case(
    "replay.ordered-with-eager-work",
    "Replays and eager work on one stream run in the order in which they were issued, without a synchronise.",
    cause="replay() launches on a stream of its own instead of the current one",
)
def test_order(platform: Platform) -> None:
    x, out = torch.zeros(1 << 16, device=platform.device), torch.zeros(1 << 16, device=platform.device)
    log = torch.zeros(20, device=platform.device)
    graph = captured(platform, lambda: out.copy_(x * 2 + 1))
    for i in range(20):
        x.fill_(i)
        graph.replay()
        log[i : i + 1].copy_(out[-1:])
    platform.synchronize()
    assert on_host(log).tolist() == [2.0 * i + 1 for i in range(20)]
    graph.close()


@case(
    "replay.on-a-side-stream",
    "A replay on another stream is part of that stream's order.",
    cause="replay() ignores the current stream",
)
def test_side_stream(platform: Platform) -> None:
    x, out = torch.zeros(4096, device=platform.device), torch.zeros(4096, device=platform.device)
    graph = captured(platform, lambda: out.copy_(x * 2))
    side, main = platform.stream(), platform.current_stream()
    x.fill_(21)
    side.wait_stream(main)
    with platform.use(side):
        graph.replay()
    main.wait_stream(side)
    result = out + 0
    platform.synchronize()
    assert on_host(result)[0].item() == 42.0
    graph.close()


@case(
    "replay.from-another-thread",
    "A graph captured in one thread replays in another.",
    cause="thread-local state in the graph or the platform",
)
def test_thread(platform: Platform) -> None:
    x, out = torch.full((64,), 4.0, device=platform.device), torch.zeros(64, device=platform.device)
    graph = captured(platform, lambda: out.copy_(x * 2))
    errors: list[BaseException] = []

    def work() -> None:
        try:
            graph.replay()
            platform.synchronize()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert errors == []
    assert on_host(out)[0].item() == 8.0
    graph.close()


@case(
    "replay.ten-thousand-without-growth",
    "10,000 replays take no memory.",
    hazard="reset-leaks-pool",
    cause="replay() allocates, or keeps an event or a handle of each launch",
    timeout=180,
)
def test_growth(platform: Platform) -> None:
    x, out = torch.ones(64, device=platform.device), torch.zeros(64, device=platform.device)
    graph = captured(platform, lambda: out.copy_(x.exp() * 2))
    for _ in range(10):
        graph.replay()
    platform.synchronize()
    gc.collect()
    before = platform.memory()
    for i in range(10_000):
        graph.replay()
        if i % 1000 == 999:
            platform.synchronize()
    after = platform.memory()
    assert (after.allocated, after.reserved) <= (before.allocated, before.reserved)
    assert torch.allclose(on_host(out), (on_host(x)).exp() * 2)
    graph.close()


@case(
    "replay.closing-gives-memory-back",
    "Graphs that come and go take no more memory than the first of them.",
    hazard="reset-leaks-pool",
    cause="close() or reset() keeps the graph's share of the pool",
)
def test_closing(platform: Platform) -> None:
    x = torch.ones(1 << 20, device=platform.device)

    def once() -> int:
        graph = captured(platform, lambda: (x * 2).exp().sum())
        graph.replay()
        platform.synchronize()
        graph.close()
        del graph
        gc.collect()
        return platform.memory().reserved

    once()
    settled = once()
    assert max(once() for _ in range(6)) <= settled


@case(
    "replay.reset-gives-memory-back",
    "A graph that is reset and captured again takes no more memory each time.",
    hazard="reset-leaks-pool",
    cause="reset() keeps the graph's share of the pool",
)
def test_reset(platform: Platform) -> None:
    x = torch.ones(1 << 20, device=platform.device)
    platform.synchronize()
    graph = platform.graph()

    def once() -> int:
        with graph.capture():
            (x * 2).exp().sum()
        graph.replay()
        platform.synchronize()
        graph.reset()
        gc.collect()
        return platform.memory().reserved

    once()
    settled = once()
    assert max(once() for _ in range(6)) <= settled
    graph.close()


@case(
    "replay.many-graphs-live",
    "As many graphs as a drafter's size ladder needs live at once, and each replays right.",
    hazard="exec-budget",
    cause="a resource per graph (stream, event, exec) runs out; declare max_live_graphs",
    timeout=120,
)
def test_many(platform: Platform) -> None:
    limit = platform.capabilities.max_live_graphs
    count = 200 if limit is None else min(200, limit)
    x, out = torch.ones(32, device=platform.device), torch.zeros(32, device=platform.device)
    pool = platform.graph_pool() if platform.capabilities.shared_pool else None
    graphs = [captured(platform, lambda i=i: out.copy_(x * i), pool, warm_up=False) for i in range(count)]
    for i in (0, count // 2, count - 1):
        assert_replays(graphs[i], platform, x, out, float(i))
    for graph in graphs:
        graph.close()


@case(
    "replay.a-thousand-ops",
    "A graph of a thousand dependent ops gives what eager gives.",
    cause="a limit on nodes, or missing dependencies between them",
)
def test_long(platform: Platform) -> None:
    x, out = torch.ones(16, device=platform.device), torch.zeros(16, device=platform.device)

    def body() -> Tensor:
        y = x
        for i in range(500):
            y = (y * 1.001).add(i % 3)
        return y

    graph = captured(platform, lambda: out.copy_(body()), warm_up=False)
    for value in (1.0, -2.0):
        x.fill_(value)
        graph.replay()
        platform.synchronize()
        expect_equal(on_host(out), on_host(body()))
    graph.close()


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "grad"])
@case(
    "replay.in-every-grad-mode",
    "Capture and replay work in each of torch's gradient modes.",
    cause="inference tensors made in a capture, or autograd recorded through it",
)
def test_grad_modes(platform: Platform, mode: str) -> None:
    context = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "grad": torch.enable_grad}[mode]
    with context():
        x, out = torch.ones(16, device=platform.device), torch.zeros(16, device=platform.device)
        graph = captured(platform, lambda: out.copy_(x * 2))
        x.fill_(3)
        graph.replay()
    platform.synchronize()
    assert on_host(out)[0].item() == 6.0
    graph.close()
