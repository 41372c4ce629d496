"""The capabilities of this machine's device. Each is claimed only if a trial, a computation that needs it, gave the
right numbers. Trials run in a process of their own (`specgraph.device.trial_process`): a device fault ends only
that."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from specgraph.device import Capabilities, Support, no, quirk, trial, yes
from specgraph.device.trial_process import Findings, answer
from specgraph.errors import first_line

from specgraph_musa.graph import is_rotating, release_share
from specgraph_musa.policy import RULES, Policy
from specgraph_musa.triton_ops import agree_with_reference

if TYPE_CHECKING:
    from specgraph_musa.platform import MusaPlatform

_TRIAL_BYTES = 32 << 20
_log = logging.getLogger(__name__)


def find_release(platform: MusaPlatform) -> str:
    """Set and return `MusaPlatform.release`: capture 32 MiB into a pool, close the graph, and see which call gives the
    memory back. Raises the runtime's error if the capture fails."""
    platform.release, musa, index = "never", platform.musa, platform.index
    musa.empty_cache()
    before = musa.memory_reserved(index)
    graph = platform.graph()
    with graph.capture():
        torch.empty(_TRIAL_BYTES, dtype=torch.uint8, device=platform.device).fill_(0)
    handle = graph.pool_handle
    graph.close()
    if musa.memory_reserved(index) - before < _TRIAL_BYTES:
        platform.release = "by_reset"
        return platform.release
    try:
        release_share(index, handle)
        musa.empty_cache()
        if musa.memory_reserved(index) - before < _TRIAL_BYTES:
            platform.release = "by_own_call"
    except (ImportError, AttributeError, RuntimeError) as error:
        _log.warning("closed graphs keep their memory: this torch_musa can't give pools back (%s)", first_line(error))
    return platform.release


TRIALS: Mapping[str, trial.Trial] = {
    "release": find_release,
    "graphs": trial.replays_follow_their_input,
    "shared_pool": trial.graphs_share_a_pool,
    "merged_loop": trial.a_loop_in_one_graph,
    "random_in_graph": lambda platform: trial.random_goes_on(
        platform,
        lambda: platform.musa.get_rng_state(platform.index),
        lambda state: platform.musa.set_rng_state(state, platform.index),
    ),
    "float8": trial.float8_is_copied,
    "triton": agree_with_reference,
}
"""The trials in the order in which they run. The others rely on "release"; the kernels, which must be compiled first,
come last."""


def capabilities(found: Findings, policy: Policy) -> Capabilities:
    """Return the capabilities that `found` supports and `policy` allows. Those not claimed carry a reason."""

    def claim(name: str, reason: str = "") -> Support:
        return trial.support(found["graphs"] or found[name], reason)

    merged = claim("merged_loop") and policy.merged_loop
    return Capabilities(
        graphs=claim("graphs"),
        shared_pool=claim("shared_pool", "capture the largest graph first"),
        external_events=no("not claimed: torch.musa.Event(external=True) of newer releases was never tried"),
        task_update=no("torch.musa.MUSAGraph updates no captured task; attention here reads lengths from the device"),
        merged_loop=merged,
        collectives_in_graph=claim("graphs") and policy.collectives_in_graph,
        random_in_graph=claim("random_in_graph")
        and quirk("the default generator only: torch.musa registers no other with a graph"),
        host_read_detection=no("not claimed: its trial is a failed capture, after which torch_musa does not clean up"),
        float8=trial.support(found["float8"]),
        order_detection=no("the runtime reports nothing; run on the cpu platform for that"),
        notes={"triton": no(f"{found['triton']}. The plain torch ops run, slower") if found["triton"] else yes()},
        max_live_graphs=None if is_rotating() else policy.max_live_graphs,
        update_order="before_replay",
        default_lowering="merged" if merged else "step",
        rules=RULES,
    )


if __name__ == "__main__":  # INDEX TRIAL...
    from specgraph_musa.platform import MusaPlatform

    answer(MusaPlatform(int(sys.argv[1]), found={}), TRIALS, sys.argv[2:])
