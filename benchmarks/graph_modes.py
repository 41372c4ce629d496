"""Graph modes FULL and FULL_AND_PIECEWISE with the shipped pair: prompts as one graph, or as graphs between attention.

    python benchmarks/graph_modes.py --platform cuda --json h200-graph-modes.json

One request at a time, whole requests: milliseconds until the first token (median of all requests), and tokens per
second (the fastest of the repeats). All modes and lowerings in turns, in one process; their tokens must be the same.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from specgraph.cli.env import environment
from specgraph.device import open_platform
from specgraph.engine.load import load_generator
from specgraph.tools.decoding import PROMPTS

WAYS = [(mode, lowering) for lowering in ("merged", "round") for mode in ("FULL_AND_PIECEWISE", "FULL")]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform")
    parser.add_argument("-k", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    platform = open_platform(asked.platform)
    generators = {
        way: load_generator(platform=platform, num_speculative_tokens=asked.k, mode=way[0], lowering=way[1])
        for way in WAYS
    }
    first: dict[tuple[str, str], list[float]] = {way: [] for way in WAYS}
    seconds: dict[tuple[str, str], list[float]] = {way: [] for way in WAYS}
    texts: dict[tuple[str, str], list[list[int]]] = {}
    for repeat in range(asked.repeats + 1):
        for way, generator in generators.items():
            requests = [generator.request(prompt, max_tokens=asked.max_tokens) for prompt in PROMPTS]
            start = time.perf_counter()
            texts[way] = [list(generator.generate([request])[0].token_ids) for request in requests]
            took = time.perf_counter() - start
            firsts: list[float] = []
            for prompt in PROMPTS:
                one = generator.request(prompt, max_tokens=1)
                began = time.perf_counter()
                generator.generate([one])
                firsts.append(time.perf_counter() - began)
            if repeat:  # the first one warms up
                seconds[way].append(took)
                first[way] += firsts
    rows: list[dict[str, Any]] = [
        {
            "mode": mode,
            "lowering": lowering,
            "first_token_ms": round(1000 * statistics.median(first[mode, lowering]), 3),
            "tokens_per_second": round(sum(map(len, texts[mode, lowering])) / min(seconds[mode, lowering]), 1),
            "same_tokens": texts[mode, lowering] == texts[WAYS[0]],
        }
        for mode, lowering in WAYS
    ]
    for row in rows:
        print(row, flush=True)
    if asked.json is not None:
        command = shlex.join(["python", "benchmarks/graph_modes.py", *sys.argv[1:]])
        asked.json.write_text(json.dumps({**environment(platform), "command": command, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
