"""Task update on CUDA, an optional part of this backend: `probe.TASK_UPDATE` names it, and nothing else imports it.

`enable` tries it on a GPU. If it works, `graph` makes the platform's graphs and pools, `tasks` makes its task groups
and updates, and attention with host lengths runs through `host_lengths`.
"""

from __future__ import annotations

import torch

from specgraph.device import Platform, Support, trial
from specgraph_cuda.platform import CudaPlatform
from specgraph_cuda.task_update.graph import UpdatableGraph, UpdatableGraphPool
from specgraph_cuda.task_update.host_lengths import register_host_attention
from specgraph_cuda.task_update.host_values import store
from specgraph_cuda.task_update.tasks import TaskUpdates


def enable(platform: CudaPlatform) -> Support:
    """Give the platform task updates if they work on its GPU. Otherwise leave it as it was, and return the reason."""
    before = platform.graph_type, platform.pool_type
    platform.tasks = TaskUpdates(platform)
    platform.graph_type, platform.pool_type = UpdatableGraph, UpdatableGraphPool
    found = trial.claim(platform, rewritten_values, "node parameters of the executable graph, through cuda.bindings")
    if found:
        register_host_attention()
    else:
        platform.tasks = None
        platform.graph_type, platform.pool_type = before
    return found


def rewritten_values(platform: Platform) -> str | None:
    """Rewrite values before each of two replays, without waiting in between. Return the error found, or None."""
    x, total = (torch.zeros(3, dtype=torch.int32, device=platform.device) for _ in range(2))
    store(x, [0, 0, 0])
    total.add_(x)
    platform.synchronize()
    graph = platform.graph()
    try:
        with graph.capture():
            with platform.task_group() as group:
                store(x, [1, 2, 3])
            total.add_(x)
        for values in ([5, 0, 7], [10, 20, 30]):
            with platform.task_update(group):
                store(x, values)
            graph.replay()
        seen = total.tolist()
        return None if seen == [15, 20, 37] else f"rewritten values added up to {seen} instead of [15, 20, 37]"
    finally:
        graph.close()
