"""Capabilities of the device at hand. Each claim is a computation that ran: claims carried over from elsewhere were
wrong in both directions in the field, until each was tried."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from specgraph.platforms import Capabilities, Support, no, quirk, yes

from specgraph_musa.kernels import probe_triton
from specgraph_musa.policy import RULES

if TYPE_CHECKING:
    from specgraph_musa.platform import MusaPlatform

Answer = str | None
"""What is wrong with a computation's result; None if nothing."""


def probe_capabilities(platform: MusaPlatform, find_release: Callable[[], None]) -> Capabilities:
    """Try everything that can be tried in some milliseconds.

    Args:
        find_release: settles how pools are given back; the first capture of all.
    """
    graphs = claim(lambda: (find_release(), replays_compute(platform))[1], "a captured computation")

    def on_graphs(probe: Callable[[MusaPlatform], Answer], what: str, reason: str = "") -> Support:
        return claim(lambda: probe(platform), what, reason) if graphs else graphs

    return Capabilities(
        graphs=graphs,
        shared_pool=on_graphs(pools_are_shared, "two graphs in one pool", "capture the largest graph first"),
        external_events=no("torch.musa.Event has no external events: enable_timing, blocking and interprocess are all"),
        task_update=no("torch.musa.MUSAGraph updates no captured task; attention here reads lengths from the device"),
        merged_loop=on_graphs(loop_in_one_graph, "a loop of dependent steps in one graph"),
        collectives_in_graph=no(
            "not claimed: captured collectives lost their barrier state on one toolchain (vllm-musa #50)"
        ),
        conditional_nodes=no("torch.musa.MUSAGraph has none"),
        random_in_graph=_only_default(on_graphs(random_goes_on, "random numbers in a graph")),
        host_read_detection=no(
            "not claimed: it takes a capture that fails to see it, and torch_musa 2.7.1 does not clean up after one"
        ),
        order_detection=no("the runtime reports nothing; run on the cpu platform for that"),
        triton=probe_triton(platform),
        max_live_graphs=platform.policy.max_live_graphs,
        update_order="before_replay",
        default_lowering="step",
        rules=RULES,
    )


def claim(probe: Callable[[], Answer], what: str, reason: str = "") -> Support:
    """yes if the probe finds nothing wrong; otherwise no, with what it found."""
    try:
        wrong = probe()
    except Exception as error:
        text = str(error).strip()
        wrong = f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"
    return yes(reason) if wrong is None else no(f"its probe failed on this device: {what}: {wrong}")


def _only_default(support: Support) -> Support:
    return quirk("the default generator only: torch.musa registers no other with a graph") if support else support


def replays_compute(platform: MusaPlatform) -> Answer:
    """A captured matmul, sum and update in place, replayed on new input each time, against float64 on the host."""
    g = torch.Generator().manual_seed(0)
    inputs = [torch.randn(8, 16, generator=g) for _ in range(3)]
    weight = torch.randn(16, 4, generator=g)
    x, w = inputs[0].to(platform.device), weight.to(platform.device)
    total = torch.zeros(8, device=platform.device)
    platform.synchronize()
    with platform.use(platform.capture_stream):
        (x @ w).sum()  # libraries allocate for good on a stream's first use: not in a graph's pool
    graph = platform.graph()
    try:
        with graph.capture():
            y = x @ w
            total.add_(y.sum(1))
        expected = torch.zeros(8, dtype=torch.float64)
        for i, new in enumerate(inputs):
            x.copy_(new)
            graph.replay()
            product = new.double() @ weight.double()
            expected += product.sum(1)
            if not torch.allclose(_on_host(y).double(), product, atol=5e-2, rtol=5e-2):
                return f"replay {i} gave a wrong product"
        if not torch.allclose(_on_host(total).double(), expected, atol=0.2, rtol=5e-2):
            return "what a replay adds in place did not add up"
        return None
    finally:
        graph.close()


def pools_are_shared(platform: MusaPlatform) -> Answer:
    """Two graphs of one pool, whose outputs both live on: neither may write over the other's."""
    device, pool = platform.device, platform.graph_pool()
    x = torch.arange(64, dtype=torch.float32, device=device)
    first, second = platform.graph(pool), platform.graph(pool)
    try:
        with first.capture():
            big = x.repeat(16) + 1
        with second.capture():
            small = x * 3
        x.add_(1)
        first.replay()
        second.replay()
        host = _on_host(x)
        if not torch.equal(_on_host(small), host * 3):
            return "the second graph's result is wrong"
        if not torch.equal(_on_host(big), host.repeat(16) + 1):
            return "the first graph's result is wrong after the second ran"
        return None
    finally:
        first.close()
        second.close()
        pool.close()


def loop_in_one_graph(platform: MusaPlatform, steps: int = 24) -> Answer:
    """Dependent steps in one graph, each moving a counter that the next one reads, and writing the column it names."""
    device = platform.device
    state = torch.arange(1, 5, dtype=torch.int64, device=device)
    step = torch.zeros(1, dtype=torch.int64, device=device)
    out = torch.zeros(4, steps, dtype=torch.int64, device=device)
    graph = platform.graph()
    try:
        with graph.capture():
            step.zero_()
            for _ in range(steps):
                state.copy_((state * 5 + step) % 9973)
                out.index_copy_(1, step, state[:, None])
                step.add_(1)
        expected = _on_host(state)
        for i in range(2):
            graph.replay()
            for k in range(steps):
                expected = (expected * 5 + k) % 9973
                if not torch.equal(_on_host(out[:, k]), expected):
                    return f"step {k} of replay {i} is wrong"
        return None
    finally:
        graph.close()


def random_goes_on(platform: MusaPlatform) -> Answer:
    """Two replays draw what two eager calls draw."""
    musa, device, index = platform.musa, platform.device, platform.index
    saved = musa.get_rng_state(index)
    graph = platform.graph()
    try:
        eager = [_on_host(torch.rand(8, device=device)) for _ in range(2)]
        musa.set_rng_state(saved, index)
        with graph.capture():
            drawn = torch.rand(8, device=device)
        replayed: list[torch.Tensor] = []
        for _ in range(2):
            graph.replay()
            replayed.append(_on_host(drawn))
        if torch.equal(replayed[0], replayed[1]):
            return "two replays drew the same numbers"
        same = all(torch.equal(a, b) for a, b in zip(eager, replayed, strict=True))
        return None if same else "replays draw other numbers than eager does"
    finally:
        graph.close()
        musa.set_rng_state(saved, index)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in every case: `.cpu()` of a tensor in host memory is that tensor."""
    return tensor.detach().to("cpu", copy=True)
