"""Times the states of gated delta nets on a GPU, at the shapes of Qwen3-Next-80B-A3B and Qwen3.5-27B, random weights.

    python benchmarks/recurrent_states.py states.json

Per model, requests and K: microseconds of one layer's op in a graph, with as many records to fold as a round can leave
and with none, their difference (the fold), the bytes of the states, and the time that moving these bytes would take.
Prompts: microseconds of one layer for 512 rows. It writes one JSON file.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from specgraph_cuda.backend import open_device
from specgraph_models import ops
from specgraph_models.delta import DeltaConfig
from specgraph_models.ops.delta import DeltaState, DeltaWeights, StateRows
from specgraph_run.decoder.states import RequestStates, bytes_per_request

MODELS = {
    "Qwen3-Next-80B-A3B": (36, DeltaConfig(key_heads=16, value_heads=32, key_size=128, value_size=128, kernel=4)),
    "Qwen3.5-27B": (48, DeltaConfig(key_heads=16, value_heads=48, key_size=128, value_size=128, kernel=4)),
}
REPEATS = 20


def main(path: Path) -> None:
    platform = open_device(0)
    device, dtype, results = platform.device, torch.bfloat16, list[dict[str, Any]]()
    for name, (layers, sizes) in MODELS.items():
        for requests in (1, 16, 64):
            for k in (1, 3, 5):
                results.append({"model": name, "layers": layers} | verify(device, dtype, sizes, requests, k, layers))
                print(results[-1], flush=True)
        results.append({"model": name, "layers": layers} | prompt(device, dtype, sizes))
        print(results[-1], flush=True)
    info = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "repeats": REPEATS}
    path.write_text(json.dumps({**info, "results": results}, indent=1))
    platform.close()


def made(device: torch.device, dtype: torch.dtype, sizes: DeltaConfig, requests: int, rows: int, most: int) -> Any:
    """Inputs of one layer, its weights, and states of `requests` requests."""
    states = RequestStates(
        [sizes], max_num_requests=requests, most_rows=most, num_blocks=requests + 1, dtype=dtype, device=device
    )
    heads, wide = sizes.value_heads, {"device": device, "dtype": torch.float32}
    weights = DeltaWeights(
        torch.randn(sizes.channels, sizes.kernel, device=device, dtype=dtype) / 2,
        -torch.rand(heads, **wide),
        torch.zeros(heads, **wide),
    )
    total = requests * rows
    mixed = torch.randn(total, sizes.channels, device=device, dtype=dtype)
    gates = torch.randn(total, 2 * heads, device=device, dtype=dtype)
    return mixed, gates, weights, states.layers[0]


def rows_at(device: torch.device, requests: int, rows: int, start: int, pending: int) -> StateRows:
    """The places of live requests, with `pending` records each."""
    each = (torch.full((requests,), value, device=device) for value in (start, rows))
    slots = torch.arange(1, requests + 1, device=device)
    start_, count = each
    return StateRows(start_, count, slots, torch.full((requests,), pending, device=device))


def verify(
    device: torch.device, dtype: torch.dtype, sizes: DeltaConfig, requests: int, k: int, layers: int
) -> dict[str, Any]:
    mixed, gates, weights, state = made(device, dtype, sizes, requests, k + 1, k + 1)
    took = {
        name: timed(lambda at=at: ops.gated_delta_rule(mixed, gates, weights, state, at, False))
        for name, at in (
            ("with_fold_us", rows_at(device, requests, k + 1, 1000, k + 1)),
            ("without_fold_us", rows_at(device, requests, k + 1, 1000, 0)),
        )
    }
    resting = rows_at(device, requests, k + 1, 1000, 0)
    moved = 2 * requests * sizes.value_heads * sizes.key_size * sizes.value_size * 4
    return {
        "requests": requests,
        "k": k,
        **took,
        "fold_us": took["with_fold_us"] - took["without_fold_us"],
        "all_layers_ms": took["with_fold_us"] * layers / 1000,
        "state_traffic_us_at_4.8_TB_s": moved / 4.8e6,
        "states_gib": requests * bytes_per_request([sizes] * layers, k + 1, dtype) / 2**30,
        "plain_torch_us": timed(lambda: plain(mixed, gates, weights, state, resting), 3),
    }


def plain(mixed: torch.Tensor, gates: torch.Tensor, weights: DeltaWeights, state: DeltaState, at: StateRows) -> Any:
    return ops.gated_delta_rule.reference(mixed, gates, weights, state, at, False)


def prompt(device: torch.device, dtype: torch.dtype, sizes: DeltaConfig) -> dict[str, Any]:
    mixed, gates, weights, state = made(device, dtype, sizes, 1, 512, 4)
    at = rows_at(device, 1, 512, 0, 0)
    took = timed(lambda: ops.gated_delta_rule(mixed, gates, weights, state, at, True))
    return {"requests": 1, "prompt_rows": 512, "with_fold_us": took}


def timed(work: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Return the median microseconds of 10 calls in one graph, divided by 10."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            work()
    found: list[float] = []
    for _ in range(repeats + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 100)
    return round(statistics.median(found[3:]), 2)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "states.json"))
