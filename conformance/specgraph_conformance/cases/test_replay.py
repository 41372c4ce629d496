"""Replay: it reads the current inputs, writes its outputs in place, and gives the bits of eager."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from specgraph.device import Graph, Platform
from torch import Tensor
from torch.nn import functional

from specgraph_conformance.case import case
from specgraph_conformance.rig import captured, expect_equal, in_another_thread, on_host, replay_and_wait

WIDTH = 64


def assert_replays(graph: Graph, platform: Platform, x: Tensor, out: Tensor, expected: float) -> None:
    """Check that a replay gives `expected` times x."""
    replay_and_wait(platform, graph)
    expect_equal(on_host(out), on_host(x) * expected)


@case(
    "replay.inputs-written-in-place-are-seen",
    "A replay reads what was written into its inputs since the last one.",
    hazard="stale-metadata-copied-late",
    cause="the capture copied its inputs, or replays on a stream that isn't ordered after the write",
    quick=True,
)
def test_in_place(platform: Platform) -> None:
    x, out = torch.zeros(1 << 16, device=platform.device)[-256:], torch.zeros(256, device=platform.device)
    others, sum_of_all = [torch.zeros(4, device=platform.device) for _ in range(70)], torch.zeros(4).to(platform.device)

    def body() -> None:
        out.copy_(x * 2)
        sum_of_all.copy_(sum(others[1:], others[0]))

    graph = captured(platform, body)
    for value in (1.0, -3.5, 7.25):
        x.fill_(value)
        for number, other in enumerate(others):
            other.fill_(value * number)
        assert_replays(graph, platform, x, out, 2.0)
        assert on_host(sum_of_all).tolist() == [value * 35 * 69] * 4, "70 tensors as they were before the replay"
    for value in (4.0, 9.0):  # the second replay is issued before the first copy has ended
        given = torch.full((256,), value)
        x.copy_(given, non_blocking=True)
        assert_replays(graph, platform, x, out, 2.0)


@case(
    "replay.outputs-stay-in-place",
    "Every replay writes its result to the tensor that was made in the capture, at the same address.",
    cause="the private pool gives the block away after the capture, or replays allocate",
    quick=True,
)
def test_outputs(platform: Platform) -> None:
    x = torch.ones(128, device=platform.device)
    platform.synchronize()
    count, graph = torch.zeros(1, device=platform.device), platform.graph()
    with graph.capture():
        _ = x[:0] * 3  # an op without work: the ops after it must still run
        out = x * 3
        count.add_(1)
    address = out.data_ptr()
    for value in (2.0, 5.0):
        x.fill_(value)
        assert_replays(graph, platform, x, out, 3.0)
        assert out.data_ptr() == address
    for _ in range(300):
        graph.replay()
    platform.synchronize()
    assert on_host(count).item() == 302.0, "of 302 replays, some wrote nothing"
    del out
    graph.close()


@case(
    "replay.every-output-of-an-op",
    "A replay writes each of the three results of one op, also where some of them are not used in the capture.",
    hazard="outputs-of-one-op",
    cause="the recorder keeps one or two results of an op, or those alone that a later op reads",
    quick=True,
)
def test_three_outputs(platform: Platform) -> None:
    x, total = torch.zeros(6, 4, device=platform.device), torch.zeros(2, 4, device=platform.device)
    made: list[tuple[Tensor, ...]] = []

    def body() -> None:
        made[:] = [torch.ops.aten.split_copy.Tensor(x, 2) for _ in range(2)]
        total.copy_(made[0][2] - made[0][1])

    graph = captured(platform, body, warm_up=False)
    for factor in (1.0, -3.0):
        x.copy_(factor * torch.arange(24.0).view(6, 4) ** 2)
        replay_and_wait(platform, graph)
        for seen in made:
            expect_equal(on_host(torch.cat(seen)), on_host(x), "the three results")
        expect_equal(on_host(total), on_host(x[4:] - x[2:4]), "what follows from the last two")


@case(
    "replay.graphs-interleave-in-one-pool",
    "Graphs that share a pool, captured largest first, give eager's bits in any order.",
    cause="the pool hands memory that one graph still needs in its replay to another",
    needs=("shared_pool",),
)
def test_interleaved(platform: Platform, seed: int) -> None:
    pool = platform.graph_pool()
    rows = [16, 8, 4, 2, 1]
    x, out = torch.ones(16, WIDTH, device=platform.device), torch.zeros(16, WIDTH, device=platform.device)
    w = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed)).to(platform.device)

    def body(n: int) -> Tensor:
        return torch.tanh(x[:n] @ w) @ w.T + x[:n].sin() * n

    made, left, graphs = dict[int, Tensor](), dict[int, Tensor](), dict[int, Graph]()

    def both(n: int) -> None:
        made[n] = body(n)  # the last call is the captured one: its result is in the pool, and alive
        out[:n].copy_(made[n])

    def replay(n: int) -> None:
        replay_and_wait(platform, graphs[n])
        for smaller in [m for m in left if m < n]:  # captured later, maybe in this graph's scratch memory
            del left[smaller]
        left[n] = on_host(body(n))
        expect_equal(on_host(out[:n]), left[n])
        expect_left()

    def expect_left() -> None:
        for n, values in left.items():
            expect_equal(on_host(made[n]), values, f"what the graph of {n} rows left in memory of the pool")

    for n in rows:
        graphs[n] = captured(platform, lambda n=n: both(n), pool)
        expect_left()
        replay(n)
    order = random.Random(seed)
    for n in (*order.choices(rows, k=40), *rows):
        x.copy_(torch.randn(16, WIDTH))
        replay(n)
    graphs[1].close()
    del left[1]
    expect_left()


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
    assert one.pool is not other.pool, "graph_pool() gave the same pool twice"
    with one.capture():
        kept = (x + 1) * 2
    address = kept.data_ptr()
    result = kept[:1].expand(1)  # a view: the tensor object itself is freed, as with a vendor's weak reference
    del kept
    with other.capture():
        scratch = [(x * i).exp() for i in range(8)]
        taken = address in {t.data_ptr() for t in scratch}
        assert not taken, "a graph of the other pool got the memory of a tensor that the first pool's graph returned"
    one.replay()
    replay_and_wait(platform, other)
    assert on_host(result).item() == 4.0
    del scratch, result
    one.close()
    other.close()
    other.close()


@case(
    "replay.on-a-side-stream",
    "A replay inside use(stream) runs on that stream: after the work issued to it before and before the work after it.",
    hazard="replay-on-default-stream",
    cause="replay() launches on the default stream whatever stream is current",
)
def test_side_stream(platform: Platform) -> None:
    x, out = torch.zeros(1 << 22, device=platform.device), torch.zeros(1 << 22, device=platform.device)
    graph = captured(platform, lambda: out.copy_(x * 2))
    side = platform.stream()
    x.zero_()
    platform.synchronize()
    # Only the side stream orders this work: its additions take far longer than the host needs to issue the replay.
    with platform.use(side):
        for _ in range(100):
            x.add_(1)
        graph.replay()
        seen = out.clone()
    side.synchronize()
    values = on_host(seen).unique().tolist()
    assert values == [200.0], f"the replay read {[v / 2 for v in values]} where 100 additions on its stream came before"


@case(
    "replay.from-another-thread",
    "A graph captured in one thread replays in another.",
    cause="thread-local state in the graph or the platform",
)
def test_thread(platform: Platform) -> None:
    x, out = torch.full((64,), 4.0, device=platform.device), torch.zeros(64, device=platform.device)
    graph = captured(platform, lambda: out.copy_(x * 2))
    out.zero_()  # the warm-up wrote it
    platform.synchronize()
    in_another_thread(lambda: replay_and_wait(platform, graph))
    assert on_host(out)[0].item() == 8.0
    theirs = in_another_thread(lambda: captured(platform, lambda: out.copy_(x * 5), warm_up=False))
    replay_and_wait(platform, theirs)
    assert on_host(out)[0].item() == 20.0, "a graph that another thread captured"


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


ROWS = 6

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
    "scatter": lambda x, i, b: torch.zeros(ROWS, WIDTH, device=x.device).scatter_(1, i[:, None], 1.0),
    "slices": lambda x, i, b: b.clone()[1:4].copy_(x[:3]).sum(dim=0),
    # This op also reads 12-byte and 8-byte pieces, which must be aligned.
    "integers": lambda x, i, b: (((i * 40503 + 7) ^ (i << 3)) & 1023) + ((x[:, :2] > 0) * i[:3].sum()).sum(1),
    "bfloat16": lambda x, i, b: (x.bfloat16() @ b.bfloat16().T).float(),
    "strided": lambda x, i, b: x.T.contiguous().T + torch.cat([b[:, ::2], b[:, 1::2]], dim=1).T.contiguous().T,
}


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
        replay_and_wait(platform, graph)
        expect_equal(on_host(out), on_host(OPS[op](x, ids, b)))
