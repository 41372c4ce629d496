# pyright: reportPrivateUsage=false, reportMissingImports=false
"""Times vLLM's own drafter and specgraph's, in turns in one engine: 8B shapes, dummy weights, K = 5.

    python integrations/gpu/vllm_times.py --method mtp --rows 32768 --out FILE.json
    python integrations/gpu/vllm_times.py --method eagle3 --out FILE.json
    python integrations/gpu/vllm_times.py --method mtp --stock-alone --options '{"draft_lm_head_quantization": "fp8"}' \
      --out FILE.json

All ways draft over the same weights and KV cache. `--rows` adds specgraph with a draft vocabulary of so many tokens,
drawn at random: with dummy weights it does not matter which. `--options` are further keys of `speculative_config`.

`propose_device_us` is the time between events around `propose`. The device is kept busy before it, so that host time
does not show. `round_us` is the time from one propose to the next, as it comes. Hardly a draft is accepted with dummy
weights; docs/draft-vocabulary.md has acceptance.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy
import torch
from engines import environment
from shapes_8b import EAGLE3, LLAMA3_8B
from vllm_engine import Engine, K

MIMO: dict[str, Any] = {
    "architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "intermediate_size": 11008, "vocab_size": 151680,
    "rope_theta": 640000.0, "num_nextn_predict_layers": 1, "use_sliding_window": False, "bos_token_id": 151643,
    "eos_token_id": 151645,
}  # fmt: skip
"""The published config.json of MiMo-7B where it differs from Llama 3 8B's: 36 layers and one MTP module."""
CONTEXT, NEW_TOKENS = 1024, 1000


def shape_folder(name: str, **changes: Any) -> str:
    """Write a folder with a configuration of Llama 3 8B's shapes and these changes. Returns its path."""
    path = Path(tempfile.mkdtemp()) / name
    path.mkdir()
    (path / "config.json").write_text(json.dumps(LLAMA3_8B | changes))
    return str(path)


def start_engine(method: str, layers: int, sizes: list[int], stock: bool, speculative: dict[str, Any]) -> Engine:
    """Start vLLM with dummy weights in bfloat16. `stock` leaves out the plugin."""
    draft = None
    if method == "mtp":
        target = shape_folder("target", **MIMO, num_hidden_layers=layers or 36)
    else:
        from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

        # The loader would set these, but dummy weights skip it: the drafter has its own lm_head, but no embedding.
        Eagle3LlamaForCausalLM.has_own_lm_head = True
        Eagle3LlamaForCausalLM.has_own_embed_tokens = False
        target = shape_folder("target", architectures=["LlamaForCausalLM"], num_hidden_layers=layers or 32)
        draft = shape_folder("draft", **EAGLE3)
    arguments: dict[str, Any] = {
        "load_format": "dummy", "dtype": "bfloat16", "max_num_seqs": max(sizes), "max_model_len": 2048,
        "gpu_memory_utilization": 0.5, "kv_cache_memory_bytes": 24 << 30, "enable_prefix_caching": False,
        "additional_config": {} if stock else {"specgraph": {"capture_sizes": sizes}},
    }  # fmt: skip
    return Engine(target, draft, "stock" if stock else "specgraph", method, speculative, **arguments)


class Ways:
    """The ways of drafting in one engine. `choose` changes the speculator to one of them."""

    def __init__(self, speculator: Any, rows: int, stock: bool) -> None:
        """Capture specgraph's graphs over a cut vocabulary too, if rows is not 0."""
        self._speculator = speculator
        captured: Any = None if stock else speculator.specgraph
        self._drafters: dict[str, Any] = {"stock": None}
        if not stock:
            self._drafters["specgraph"] = captured.fast_path, captured.head
        if rows:
            path = Path(tempfile.mkdtemp()) / "list.npy"
            numpy.save(path, numpy.random.default_rng(0).permutation(captured.head.vocab_size)[:rows])
            captured.fast_path = None  # else the new capture closes the graphs over all tokens
            captured.settings = dataclasses.replace(captured.settings, draft_vocab=str(path))
            captured.capture()
            self._drafters[f"specgraph, {rows} rows"] = captured.fast_path, captured.head

    @property
    def names(self) -> list[str]:
        return list(self._drafters)

    def choose(self, name: str) -> None:
        drafter = self._drafters[name]
        self._speculator.use_vllm = drafter is None
        if drafter is not None:
            self._speculator.specgraph.fast_path, self._speculator.specgraph.head = drafter


class Timer:
    """Wraps `propose`: records events of the rounds that have K + 1 rows for each of `requests` requests."""

    def __init__(self, speculator: Any) -> None:
        self.propose, self.requests, self.primed = speculator.propose, 0, False
        self.rows: list[tuple[torch.cuda.Event, torch.cuda.Event, float]] = []
        speculator.propose = self

    def __call__(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        n = self.requests
        if not n or batch.num_reqs != n or batch.num_tokens != n * (K + 1):
            return self.propose(batch, *args, **kwargs)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if self.primed:
            torch.cuda._sleep(20_000_000)  # cycles: longer than the host takes to issue the rest
        begin.record()
        host = time.perf_counter()
        drafts = self.propose(batch, *args, **kwargs)
        host_us = (time.perf_counter() - host) * 1e6
        end.record()
        self.rows.append((begin, end, host_us))
        return drafts

    def take(self) -> tuple[list[float], list[float], list[float]]:
        """Return device times, times from begin to begin, and host times, in us, without the first two rounds."""
        torch.cuda.synchronize()
        rows, self.rows = self.rows[2:], []
        device = [begin.elapsed_time(end) * 1e3 for begin, end, _ in rows]
        rounds = [one[0].elapsed_time(other[0]) * 1e3 for one, other in itertools.pairwise(rows)]
        return device, rounds, [host for _, _, host in rows]


def measure(engine: Engine, ways: Ways, timer: Timer, n: int, turns: int, rounds: int) -> list[dict[str, Any]]:
    """Return a row per way for n requests, which end afterwards."""
    draw = random.Random(n)
    names = [f"{n}-{index}" for index in range(n)]
    for name in names:
        engine.start(name, [draw.randrange(1000, 120000) for _ in range(CONTEXT)], NEW_TOKENS)
    begun: set[str] = set()

    def steps(count: int) -> None:
        for _ in range(count):
            begun.update(name for name, *_ in engine.step())

    while len(begun) < n:
        steps(1)  # prompts
    times: dict[str, tuple[list[float], list[float], list[float]]] = {way: ([], [], []) for way in ways.names}
    for turn in range(turns + 1):  # the first one is not counted
        for way in ways.names[:: -1 if turn % 2 else 1]:
            ways.choose(way)
            for timer.primed in (False, True):
                timer.requests = 0
                steps(2)
                timer.requests = n
                steps(rounds)
                device, between, host = timer.take()
                timer.requests = 0
                if turn and timer.primed:
                    times[way][0].extend(device)
                elif turn:
                    times[way][1].extend(between)
                    times[way][2].extend(host)
    for name in names:
        engine.abort(name)
    while engine.llm.has_unfinished_requests():
        engine.step()
    keys = ("propose_device_us", "round_us", "propose_host_us")
    return [
        {"requests": n, "way": way}
        | {key: round(statistics.median(each), 1) for key, each in zip(keys, found, strict=True)}
        | {"samples": [len(each) for each in found]}
        for way, found in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--method", choices=("eagle3", "mtp"), default="mtp")
    parser.add_argument("--rows", type=int, default=0, help="tokens of a draft vocabulary, measured beside all")
    parser.add_argument("--stock-alone", action="store_true", help="measure vLLM without the plugin")
    parser.add_argument("--requests", type=int, nargs="*", default=[1, 8, 32, 64])
    parser.add_argument("--layers", type=int, default=0, help="of the target; those of the published shape by default")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--options", type=json.loads, default={}, help="further keys of speculative_config")
    asked = parser.parse_args()
    begin = time.monotonic()
    engine = start_engine(asked.method, asked.layers, asked.requests, asked.stock_alone, asked.options)
    ways = Ways(engine.speculator, asked.rows, asked.stock_alone)
    timer = Timer(engine.speculator)
    result: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]), "environment": environment("vllm"), "method": asked.method,
        "num_speculative_tokens": K, "context": CONTEXT, "start_up_s": round(time.monotonic() - begin, 1), "rows": [],
    }  # fmt: skip
    print("started", result["start_up_s"], flush=True)
    for n in asked.requests:
        for row in measure(engine, ways, timer, n, asked.turns, asked.rounds):
            result["rows"].append(row)
            print(json.dumps(row), flush=True)
        result["proposes"], result["seconds"] = engine.proposes(), round(time.monotonic() - begin, 1)
        asked.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
