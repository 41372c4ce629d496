"""Calls of a merged propose to the driver, counted in a profiler's trace of the host.

The trace does not show graphs that are launched by the driver's own call, so that call is counted.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from specgraph_cuda.probe import launcher
from specgraph_run.tools.shapes import SHAPES, random_head
from torch.profiler import ProfilerActivity, profile

from specgraph.attention import allocate_caches, choose_attention
from specgraph.device import Platform
from specgraph.draft import DraftConfig, Drafter, ProposeBatch


@pytest.fixture
def launches(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The executable graphs that the driver was given to launch."""
    if launcher() is None:  # without cuda.bindings torch launches every graph
        return []
    from cuda.bindings import driver  # pyright: ignore[reportMissingImports]

    launched, real = list[Any](), driver.cuGraphLaunch

    def launch(graph: Any, stream: Any) -> Any:
        launched.append(graph)
        return real(graph, stream)

    monkeypatch.setattr(driver, "cuGraphLaunch", launch)
    return launched


def _calls(drafter: Drafter, batch: ProposeBatch, host: dict[str, Any], launches: list[Any]) -> Counter[str]:
    """Driver and runtime calls of one propose, by name."""
    drafter.propose(batch, **host)
    drafter.platform.synchronize()
    launches.clear()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as trace:
        drafter.propose(batch, **host)
        drafter.platform.synchronize()  # of the trace's own, one more than the propose has
    calls = Counter(event.name for event in trace.events() or [] if event.name.startswith("cu"))
    calls["cuGraphLaunch"] = len(launches)
    return calls


@pytest.mark.parametrize("lengths", ["device", "host"])
def test_one_graph_launch_and_no_wait(platform: Platform, launches: list[Any], lengths: str) -> None:
    if lengths == "host" and not platform.capabilities.task_update:
        pytest.skip(platform.capabilities.task_update.reason)
    head = random_head(SHAPES["eagle3-tiny-python"], platform.device, torch.bfloat16, 256)
    host = {"host_start_positions": [5, 9], "host_num_sampled": [1, 1]} if lengths == "host" else {}
    seen: dict[tuple[str, int], Counter[str]] = {}
    with torch.inference_mode():
        for lowering in ("step", "merged"):
            for k in (3, 7):
                caches = allocate_caches(head.attention_layers, 40, 16, torch.bfloat16, platform.device)
                config = DraftConfig(
                    num_speculative_tokens=k,
                    max_num_requests=2,
                    max_model_len=256,
                    capture_sizes=[2],
                    prefill_sizes=[16],
                    decode=lowering,
                )
                attention = choose_attention(lengths, platform).backend
                drafter = Drafter(head, caches, platform, config, attention=attention)
                drafter.capture()
                batch = ProposeBatch(
                    sampled_token_ids=torch.zeros(2, k + 1, dtype=torch.int64, device=platform.device),
                    num_sampled=torch.ones(2, dtype=torch.int32, device=platform.device),
                    start_positions=torch.tensor([5, 9], device=platform.device),
                    aux_hidden=torch.randn(2 * (k + 1), head.aux_size, device=platform.device).bfloat16(),
                    block_table=torch.tensor([[1, 2], [3, 4]], dtype=torch.int32, device=platform.device),
                )
                before = platform.counts().get("task_updates", 0)
                seen[lowering, k] = _calls(drafter, batch, host, launches)
                updates = (platform.counts().get("task_updates", 0) - before) / 2  # _calls proposes twice
                assert updates == (k * len(head.attention_layers) if lengths == "host" else 0)
                drafter.close()
    for (lowering, k), calls in seen.items():
        assert calls["cudaGraphLaunch"] + calls["cuGraphLaunch"] == (1 if lowering == "merged" else k), calls
        assert calls["cudaDeviceSynchronize"] <= 2, calls  # ours above, and the profiler's at its end
        assert not any("StreamSynchronize" in name or "EventSynchronize" in name for name in calls), calls
    if lengths == "device":
        assert seen["merged", 3] == seen["merged", 7]
