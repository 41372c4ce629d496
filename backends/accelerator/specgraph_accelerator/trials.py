"""The capabilities of this machine's device. Each is claimed only if a trial, a computation that needs it, gave the
right numbers. Trials run in a process of their own (`specgraph.device.trial_process`): a device fault ends only
that."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from specgraph.device import Capabilities, Rule, Support, no, quirk, trial
from specgraph.device.trial_process import Findings, answer
from specgraph.errors import CaptureError

if TYPE_CHECKING:
    from specgraph_accelerator.platform import AcceleratorPlatform

TABLE = Path(__file__).with_name("policy.md")
"""One row per decision: its reason, the place where the reason was seen, and the code that implements it."""

RULES = tuple(Rule(*map(str.strip, row.strip("|").split("|"))) for row in TABLE.read_text().splitlines()[2:])
"""The rows of `TABLE`, for `specgraph explain`."""


def random_goes_on(platform: AcceleratorPlatform) -> str | None:
    """Run `trial.random_goes_on` with the generator of the device's module."""
    module, index = platform.module, platform.index
    if not hasattr(module, "get_rng_state") or not hasattr(module, "set_rng_state"):
        return f"{module.__name__} has no get_rng_state and set_rng_state"
    return trial.random_goes_on(
        platform, lambda: module.get_rng_state(index), lambda state: module.set_rng_state(state, index)
    )


def captures_are_seen(platform: AcceleratorPlatform) -> str | None:
    """Check that `is_capturing` returns True in a capture. Return the error found, or None."""
    x, graph = torch.ones(4, device=platform.device), platform.graph()
    with graph.capture():
        x.add_(0)
        seen = platform.is_capturing()
    graph.close()
    return None if seen else "torch.Stream.is_capturing() is False in a capture"


def host_reads_are_refused(platform: AcceleratorPlatform) -> str | None:
    """Check that a capture refuses two kinds of host reads, and that a new capture works after each. Return the error
    found, or None."""
    x = torch.ones(4, device=platform.device)
    for name, read in (("item()", lambda: x[0].item()), ("cpu()", x.cpu)):
        graph = platform.graph()
        try:
            with graph.capture():
                x.add_(0)
                read()
        except CaptureError:
            pass
        else:
            return f"{name} in a capture raised nothing"
        finally:
            graph.close()
        if wrong := trial.replays_follow_their_input(platform):
            return f"after a refused {name}, {wrong}"
    return None


TRIALS: Mapping[str, trial.Trial] = {
    "graphs": trial.replays_follow_their_input,
    "shared_pool": trial.graphs_share_a_pool,
    "merged_loop": trial.a_loop_in_one_graph,
    "random_in_graph": random_goes_on,
    "float8": trial.float8_is_copied,
    "is_capturing": captures_are_seen,
    "host_read_detection": host_reads_are_refused,
}
"""The trials in the order in which they run. The last one makes captures fail."""


def capabilities(found: Findings) -> Capabilities:
    """Return the capabilities that `found` supports. Those not claimed carry a reason."""

    def claim(name: str, reason: str = "") -> Support:
        return trial.support(found["graphs"] or found[name], reason)

    merged = claim("merged_loop")
    return Capabilities(
        graphs=claim("graphs"),
        shared_pool=claim("shared_pool", "capture the largest graph first"),
        merged_loop=merged,
        task_update=no("torch.accelerator.Graph rewrites no captured op; attention here reads lengths from the device"),
        external_events=no("torch.Event has no external form"),
        collectives_in_graph=no("not claimed: never tried through torch.accelerator"),
        random_in_graph=claim("random_in_graph") and quirk("the default generator only: torch registers no other"),
        host_read_detection=claim("host_read_detection"),
        float8=trial.support(found["float8"]),
        order_detection=no("torch reports nothing; run on the cpu platform for that"),
        notes={
            "triton": no("not tried through torch.accelerator. The plain torch ops run, slower"),
            "is_capturing": claim("is_capturing"),
        },
        default_lowering="merged" if merged else "step",
        rules=RULES,
    )


if __name__ == "__main__":  # INDEX TRIAL...
    from specgraph_accelerator.platform import AcceleratorPlatform

    answer(AcceleratorPlatform(int(sys.argv[1]), found={}), TRIALS, sys.argv[2:])
