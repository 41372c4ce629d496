"""Stop tokens of many requests at every place of a round."""

from __future__ import annotations

import pytest
import torch
from specgraph import ops
from specgraph.device import Platform

from specgraph_conformance.case import case
from specgraph_conformance.rig import WAYS, on_host, run_op


@pytest.mark.parametrize("way", WAYS)
@case(
    "kernels.every-stop-token",
    "A request stops at any of its 16 stop tokens, wherever in the round it was sampled, and a launch goes on while "
    "any request does.",
    hazard="some-stop-tokens",
    cause="stop_finished or publish_round: some of the stop tokens, some of the places, or the first request only",
)
def test_stops(platform: Platform, way: str, seed: int) -> None:
    device, query_len, width = platform.device, 4, 16
    requests = query_len * width + 2
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 90, (requests, query_len), generator=generator)
    stops = torch.arange(requests * width).view(requests, width) + 100
    counts = torch.full((requests,), query_len, dtype=torch.int32)
    for r in range(query_len * width):  # request r has its stop token of column r // query_len in place r % query_len
        tokens[r, r % query_len] = stops[r, r // query_len]
    counts[-1] = 0
    left = torch.full((requests,), 50)
    ring, progress = torch.zeros(2, 12, dtype=torch.int64, device=device), torch.zeros(2, dtype=torch.int64).to(device)
    inputs = [tensor.to(device) for tensor in (tokens, counts, left, stops)]
    agains = [torch.full((1,), -7, dtype=torch.int32, device=device) for _ in range(2)]
    results = torch.zeros(10, dtype=torch.int64, device=device)

    def work() -> None:
        for again, part in zip(agains, (slice(0, requests), slice(0, requests - 2)), strict=True):
            given = [each[part] for each in inputs]
            ops.publish_round(results, *given, ring=ring, progress=progress, again=again, rounds_per_launch=9)
        ops.stop_finished(*inputs)

    run_op(platform, way, work, [ring, progress, *agains, *inputs[1:3]])
    wanted = [0] * (requests - 2) + [query_len, 0]
    seen = on_host(inputs[1]).tolist()
    missed = [r for r in range(requests) if seen[r] != wanted[r]]
    assert not missed, f"request {missed[0]} has count {seen[missed[0]]}: it must be {wanted[missed[0]]}"
    assert [int(on_host(again)) for again in agains] == [1, 0], "only the last but one request goes on"
