# pyright: reportPrivateUsage=false
"""Propose and round times of vLLM's own drafter and of specgraph's, in turns in one engine. 8B shapes, dummy weights.

    python integrations/gpu/vllm_times.py --out h200-vllm.json
    python integrations/gpu/vllm_times.py --method mtp --out h200-vllm-mtp.json

On two GPUs, where each process holds its rank of the engine and both must have the same requests:

    torchrun --nproc-per-node 2 --no-python bash -c 'python integrations/gpu/vllm_times.py --out tp2-$RANK.json \
      --options "{\"tensor_parallel_size\": 2, \"distributed_executor_backend\": \"external_launcher\"}"'

Both draft over the same weights and KV cache: `use_vllm` of the speculator says who. `propose_device_us` is the time
between events around `propose` with the device kept busy before it, so that host time does not show; `round_us` is from
one propose to the next, as it comes. With dummy weights hardly a draft is accepted: tokens.py measures acceptance.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from engines import config_folder, environment
from vllm_engine import Engine, K

MIMO = {
    "architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "intermediate_size": 11008, "vocab_size": 151680,
    "rope_theta": 640000.0, "num_nextn_predict_layers": 1, "use_sliding_window": False, "bos_token_id": 151643,
    "eos_token_id": 151645,
}  # fmt: skip
"""MiMo-7B, published, where it differs: 36 layers and one MTP module."""


class Timer:
    """Wraps `propose`: records events of the steady rounds of one number of requests."""

    def __init__(self, speculator: Any) -> None:
        self.stock, self.requests, self.primed, self.rows = speculator.propose, 0, False, []
        speculator.propose = self

    def __call__(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        n = self.requests
        if not n or batch.num_reqs != n or batch.num_tokens != n * (K + 1):
            return self.stock(batch, *args, **kwargs)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if self.primed:
            torch.cuda._sleep(20_000_000)  # cycles: longer than the host takes to issue what follows
        begin.record()
        host = time.perf_counter()
        drafts = self.stock(batch, *args, **kwargs)
        self.rows.append((begin, end, (time.perf_counter() - host) * 1e6))
        end.record()
        return drafts

    def take(self) -> tuple[list[float], list[float], list[float]]:
        """Device times, times from begin to begin, and host times, in us; the first two rounds are left out."""
        torch.cuda.synchronize()
        rows, self.rows = self.rows[2:], []
        device = [a.elapsed_time(b) * 1e3 for a, b, _ in rows]
        rounds = [a[0].elapsed_time(b[0]) * 1e3 for a, b in itertools.pairwise(rows)]
        return device, rounds, [host for _, _, host in rows]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--requests", default="1,8,32,64")
    parser.add_argument("--method", choices=("eagle3", "mtp"), default="eagle3")
    parser.add_argument("--layers", type=int, default=0, help="32, and 36 for mtp")
    parser.add_argument("--rounds", type=int, default=14)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--options", type=json.loads, default={}, help="more arguments of the engine")
    asked = parser.parse_args()
    begin = time.monotonic()
    sizes = [int(n) for n in asked.requests.split(",")]
    layers, target = asked.layers or {"mtp": 36}.get(asked.method, 32), None
    if asked.method == "mtp":
        target = config_folder("target", **MIMO, num_hidden_layers=layers)
    engine = Engine.dummy_8b(sizes, target, layers, max_model_len=2048, **asked.options)
    speculator = engine.speculator
    timer, draw = Timer(speculator), random.Random(0)
    result: dict[str, Any] = {
        "command": " ".join(sys.argv),
        "environment": environment("vllm"),
        "method": asked.method,
        "num_speculative_tokens": K,
        "context": 1024,
        "layers": layers,
        "start_up_s": round(time.monotonic() - begin, 1),
        "rows": [],
    }
    print("started", result["start_up_s"], flush=True)
    for n in sizes:
        for index in range(n):
            prompt = [draw.randrange(1000, 120000) for _ in range(1024)]
            engine.start(f"{n}-{index}", prompt, 960)
        names: set[str] = set()
        times: dict[str, list[list[float]]] = {way: [[], [], []] for way in ("stock", "specgraph")}

        def steps(count: int, way: str, names: set[str] = names) -> None:
            speculator.use_vllm = way == "stock"
            for _ in range(count):
                names.update(name for name, *_ in engine.step())

        while len(names) < n:
            steps(1, "stock")  # prompts
        steps(8, "specgraph")
        for _ in range(asked.turns):
            for way in times:
                for primed in (False, True):
                    timer.requests, timer.primed = 0, primed
                    steps(2, way)
                    timer.requests = n
                    steps(asked.rounds, way)
                    device, rounds, host = timer.take()
                    if primed:
                        times[way][0] += device
                    else:
                        times[way][1] += rounds
                        times[way][2] += host
                    timer.requests = 0
        for way, (device, rounds, host) in times.items():
            result["rows"].append(
                {
                    "requests": n,
                    "way": way,
                    "propose_device_us": round(statistics.median(device), 1),
                    "round_us": round(statistics.median(rounds), 1),
                    "propose_host_us": round(statistics.median(host), 1),
                    "samples": [len(device), len(rounds)],
                }
            )
            print(result["rows"][-1], flush=True)
        result["proposes"] = engine.proposes()
        result["seconds"] = round(time.monotonic() - begin, 1)
        asked.out.write_text(json.dumps(result) + "\n")
        for name in sorted(names):
            engine.abort(name)
        while engine.llm.has_unfinished_requests():
            engine.step()
    print("proposes", result["proposes"], flush=True)


if __name__ == "__main__":
    main()
