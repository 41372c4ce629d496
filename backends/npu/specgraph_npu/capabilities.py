"""What the opened NPU can do, from small trials on the device and from the names that torch_npu offers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specgraph.errors import SpecgraphError
from specgraph.platforms import Capabilities, Support, no, quirk, yes
from specgraph_npu.probe import has_value_wait, library_loads

if TYPE_CHECKING:
    from specgraph_npu.platform import NpuPlatform

_TASK_NAMES = ("graph_task_group_begin", "graph_task_group_end", "graph_task_update_begin", "graph_task_update_end")
_ONE_WAIT = "torch_npu takes one wait for each record that is issued; a record captured in a graph is issued once"


def probe_capabilities(platform: NpuPlatform) -> Capabilities:
    """Try out what can be tried in some milliseconds; the rest is answered by what is installed."""
    graphs = _try_graph(platform)
    missing = [name for name in _TASK_NAMES if not hasattr(platform.npu, name)]
    events = quirk(_ONE_WAIT) if hasattr(platform.npu, "ExternalEvent") else no("torch_npu has no ExternalEvent")
    if events and not has_value_wait():
        events = quirk("the runtime has no aclrtValueWait: an event must be recorded once before it is captured")
    if missing:
        updates = no(f"torch_npu lacks {', '.join(missing)}")
    elif not events:
        updates = no(events.reason)
    else:
        updates = yes("for ops that the runtime can update, attention among them; others are refused at capture")
    return Capabilities(
        graphs=graphs,
        shared_pool=graphs,
        external_events=events,
        task_update=updates if graphs else no(graphs.reason),
        merged_loop=graphs,
        collectives_in_graph=no("not tried: no test of this backend captures HCCL ops"),
        random_in_graph=quirk("torch_npu registers its default generator; specgraph's draft ops use none"),
        host_read_detection=yes("the runtime refuses to wait for a stream that is being captured"),
        order_detection=no("the runtime does not report unordered access"),
        notes={"triton": yes() if _has_triton() else no("triton-ascend is not installed")},
        max_live_graphs=None,
        update_order="during_replay",
        default_lowering="merged",
    )


def has_atb() -> Support:
    """Whether the ATB library is there, which `_npu_paged_attention` needs."""
    if library_loads("libatb.so"):
        return yes()
    return no("libatb.so is missing: install the CANN NNAL package and source its set_env.sh")


def _try_graph(platform: NpuPlatform) -> Support:
    """Capture an addition, replay it twice, look at the sum."""
    counter = torch.zeros(1, device=platform.device)
    one = torch.ones(1, device=platform.device)
    graph = platform.graph()
    try:
        with graph.capture():
            counter.add_(one)
        graph.replay()
        graph.replay()
        value = float(counter.item())
    except SpecgraphError as error:
        return no(str(error))
    finally:
        graph.close()
    return yes() if value == 2.0 else no(f"a replayed addition gave {value} instead of 2.0")


def _has_triton() -> bool:
    from importlib.metadata import PackageNotFoundError, version

    try:
        version("triton-ascend")
    except PackageNotFoundError:
        return False
    return True
