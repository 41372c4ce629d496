"""Tokens, greedy and sampled with seeds, of the shipped pair in vLLM, stock or with the plugin.

    export PYTHONPATH=integrations/gpu
    VLLM_PLUGINS=          python integrations/vllm/gpu/tokens.py --way stock --out stock.json
    VLLM_PLUGINS=specgraph python integrations/vllm/gpu/tokens.py --way specgraph --out specgraph.json

With `--drafter DIR --method eagle`, an EAGLE-1 drafter of the shipped target; with `--target DIR --method mtp`, a
folder of mimo.py. `--way off` has the plugin loaded without its key in the configuration.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from engine import K, environment, generate, make_engine, write
from prompts import acceptance, python_prompts

from specgraph import shipped_pair


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=("stock", "specgraph", "off"), required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--target", type=Path, default=shipped_pair()[0])
    parser.add_argument("--drafter", default=str(shipped_pair()[1]))
    parser.add_argument("--method", default="eagle3")
    asked = parser.parse_args()
    target, drafter = asked.target, None if asked.method == "mtp" else asked.drafter
    settings = {"capture_sizes": [1, 4, 16, 32, 64], "log_every": 500} if asked.way == "specgraph" else None
    engine, speculator = make_engine(
        str(target), drafter, settings, asked.method, dtype="float16", max_num_seqs=64,
        gpu_memory_utilization=0.1, kv_cache_memory_bytes=2 << 30,
    )  # fmt: skip
    prompts = python_prompts(target / "tokenizer.json", asked.prompts, seed=0)
    result: dict[str, Any] = {"command": " ".join(sys.argv), "way": asked.way, "environment": environment()}
    result["speculator"] = type(speculator).__name__

    def counts() -> dict[str, int]:
        return dict(speculator.counts.by_reason) if asked.way == "specgraph" else {}

    for name, part, at_once in (
        ("one", prompts[:1], 1), ("all", prompts, 64), ("sampled", prompts, 64), ("eight", prompts, 8),
    ):  # fmt: skip
        begin = time.monotonic()
        tokens, accepted = generate(engine, part, at_once, sampled=name == "sampled")
        result[name] = {
            "requests": len(part),
            "at_once": at_once,
            "seconds": round(time.monotonic() - begin, 2),
            "rounds": len(accepted),
            "tokens_per_round": round(1 + sum(accepted) / max(len(accepted), 1), 4),
            "acceptance_per_position": acceptance([accepted.count(j) for j in range(K + 1)]),
            "proposes": counts(),
            "tokens": tokens,
        }
        write(asked.out, result)
        print(name, {k: v for k, v in result[name].items() if k != "tokens"}, flush=True)


if __name__ == "__main__":
    main()
