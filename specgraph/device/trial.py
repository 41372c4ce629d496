"""Trials for the probes of backends: small computations, most of them in graphs. A backend claims a capability if its
trial gave the right numbers on this device. Each trial takes a few milliseconds and returns the fault, or None."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specgraph.device.capabilities import Support, no, yes
from specgraph.errors import first_line

if TYPE_CHECKING:
    from specgraph.device.interface import Platform

Trial = Callable[[Any], "str | None"]
"""A function that takes the platform and returns a fault, or None. A backend's own trial may need its own platform."""


def outcome(platform: Platform, trial: Trial) -> str:
    """Return the fault that the trial found, or the exception that it raised, in one line. Empty if there is none."""
    try:
        return trial(platform) or ""
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)}"


def support(wrong: str, reason: str = "") -> Support:
    """Return `yes(reason)` if `wrong`, the `outcome` of a trial, is empty. Otherwise return `no` with `wrong`."""
    return no(f"a trial on this device failed: {wrong}") if wrong else yes(reason)


def claim(platform: Platform, trial: Trial, reason: str = "") -> Support:
    """Run a trial and return the `support` of its `outcome`."""
    return support(outcome(platform, trial), reason)


def replays_follow_their_input(platform: Platform) -> str | None:
    """Check that each replay of one graph uses the new input, for its result and for an update in place."""
    x, total = torch.zeros(8, device=platform.device), torch.zeros(8, device=platform.device)
    platform.synchronize()
    with platform.use(platform.capture_stream):
        _ = x * 3 + 1  # a warm-up
    platform.synchronize()
    with closing(platform.graph()) as graph:
        with graph.capture():
            y = x * 3 + 1
            total.add_(y)
        expected = torch.zeros(8)
        for value in (0.0, 5.0, -2.0):
            x.fill_(value)
            graph.replay()
            expected += 3 * value + 1
            if not torch.equal(on_host(y), torch.full((8,), 3 * value + 1)):
                return f"a captured x * 3 + 1, replayed with x = {value}, gave {on_host(y)[0].item()}"
        return None if torch.equal(on_host(total), expected) else "updates in place did not add up over replays"


def graphs_share_a_pool(platform: Platform) -> str | None:
    """Check that two graphs in one pool don't overwrite each other's results while both results are alive."""
    x = torch.arange(64, dtype=torch.float32, device=platform.device)
    pool = platform.graph_pool()
    with closing(pool), closing(platform.graph(pool)) as first, closing(platform.graph(pool)) as second:
        with first.capture():
            large = x.repeat(16) + 1
        with second.capture():
            small = x * 3
        x.add_(1)
        first.replay()
        second.replay()
        host = on_host(x)
        if not torch.equal(on_host(small), host * 3):
            return "of two graphs in one pool, the second gave a wrong result"
        if not torch.equal(on_host(large), host.repeat(16) + 1):
            return "of two graphs in one pool, the first's result was wrong after the second ran"
        return None


def a_loop_in_one_graph(platform: Platform, steps: int = 24) -> str | None:
    """Check dependent steps in one graph. Each writes the column that a counter names, and moves the counter on."""
    device = platform.device
    state = torch.arange(1, 5, dtype=torch.int64, device=device)
    step = torch.zeros(1, dtype=torch.int64, device=device)
    out = torch.zeros(4, steps, dtype=torch.int64, device=device)
    with closing(platform.graph()) as graph:
        with graph.capture():
            step.zero_()
            for _ in range(steps):
                state.copy_((state * 5 + step) % 9973)
                out.index_copy_(1, step, state[:, None])
                step.add_(1)
        expected = on_host(state)
        for replay in range(2):
            graph.replay()
            seen = on_host(out)
            for k in range(steps):
                expected = (expected * 5 + k) % 9973
                if not torch.equal(seen[:, k], expected):
                    return f"of {steps} dependent steps in one graph, step {k} of replay {replay} is wrong"
        return None


def random_goes_on(
    platform: Platform, get_state: Callable[[], Tensor], set_state: Callable[[Tensor], None]
) -> str | None:
    """Check that two replays draw the same random numbers as two eager calls. `get_state` and `set_state` belong to the
    device's default generator; its state is restored.
    """
    saved, graph = get_state(), platform.graph()
    try:
        eager = [on_host(torch.rand(8, device=platform.device)) for _ in range(2)]
        set_state(saved)
        with graph.capture():
            drawn = torch.rand(8, device=platform.device)
        replayed: list[Tensor] = []
        for _ in eager:
            graph.replay()
            replayed.append(on_host(drawn))
        if torch.equal(*replayed):
            return "two replays drew the same numbers"
        same = torch.equal(torch.stack(eager), torch.stack(replayed))
        return None if same else "replays draw other numbers than eager does"
    finally:
        graph.close()
        set_state(saved)


def float8_is_copied(platform: Platform) -> str | None:
    """Check that the device converts values to float8_e4m3fn and back, and copies them. No graph is needed."""
    values = torch.tensor([0.0, 0.3, -1.7, 448.0, -(2.0**-9)])
    stored = values.to(torch.float8_e4m3fn)
    expected, on_device = stored.float(), torch.empty_like(stored, device=platform.device)
    for what, given in (("converted", values.to(platform.device)), ("copied", stored)):
        seen = on_host(on_device.copy_(given).float())
        if not torch.equal(seen, expected):
            return f"{what} to float8_e4m3fn, {values.tolist()} gave {seen.tolist()}"
    return None


def on_host(tensor: Tensor) -> Tensor:
    """Return a copy in host memory, even if device memory is host memory."""
    return tensor.detach().to("cpu", copy=True)
