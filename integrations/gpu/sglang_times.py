# SGLang is not there where types are checked.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false
"""Times of proposes and rounds with 8B shapes and random weights, stock SGLang and the plugin in turns in one engine.

python integrations/gpu/sglang_times.py --out times.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from engines import environment
from sglang_engine import K, dummy_8b
from sglang_round_timer import MEASURED, WARM, run_scheduler_process


def median(rows: list[dict[str, Any]], *names: str) -> float:
    """Return the median over all rows of the sum of the named columns."""
    sums = [sum(parts) for row in rows for parts in zip(*(row[name] for name in names), strict=True)]
    return round(statistics.median(sums), 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--requests", default="1,8,32,64")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--no-overlap", action="store_true", help="SGLang's --disable-overlap-schedule")
    asked = parser.parse_args()
    from sglang.srt.entrypoints.engine import Engine

    class TimedEngine(Engine):
        run_scheduler_process_func = staticmethod(run_scheduler_process)

    begin, sizes = time.monotonic(), [int(n) for n in asked.requests.split(",")]
    raw = asked.out.with_suffix(".jsonl")
    raw.unlink(missing_ok=True)
    os.environ["SPECGRAPH_TIMES"] = json.dumps({"out": str(raw), "requests": sizes})
    arguments = dummy_8b(
        "specgraph", sizes, asked.layers, context_length=4096, max_total_tokens=64 * 2048,
        disable_overlap_schedule=asked.no_overlap, tp_size=asked.tensor_parallel, port=32000,
    )  # fmt: skip
    engine = TimedEngine(**arguments)
    result: dict[str, Any] = {
        "command": " ".join(sys.argv), "environment": environment("sglang"), "num_speculative_tokens": K,
        "context": 1024, "layers": asked.layers, "overlap": not asked.no_overlap,
        "tensor_parallel": asked.tensor_parallel,
        "start_up_s": round(time.monotonic() - begin, 1),
        "rows": [],
    }  # fmt: skip
    print("started", result["start_up_s"], flush=True)
    draw, rounds = random.Random(0), (WARM + MEASURED) * 4 * asked.turns + 8
    for n in sizes:
        prompts = [[draw.randrange(1000, 120000) for _ in range(1024)] for _ in range(n)]
        # Random weights accept next to nothing: a token per round. Later requests begin while earlier ones decode.
        params = {"temperature": 0.0, "max_new_tokens": rounds + 40, "ignore_eos": True}
        engine.generate(input_ids=prompts, sampling_params=params)
        read = [row for row in map(json.loads, raw.read_text().splitlines()) if row["requests"] == n]
        for way in ("stock", "specgraph"):
            natural = [row for row in read if row["way"] == way and not row["primed"]]
            primed = [row for row in read if row["way"] == way and row["primed"]]
            if not natural or not primed:
                print("no phase of", n, way, flush=True)
                continue
            result["rows"].append(
                {
                    "requests": n,
                    "way": way,
                    "propose_device_us": median(primed, "draft_us", "extend_us"),
                    "round_us": median(natural, "round_us"),
                    "propose_host_us": median(natural, "host_us"),
                    "samples": [MEASURED * len(primed), MEASURED * len(natural)],
                }
            )
            print(result["rows"][-1], round(time.monotonic() - begin, 1), flush=True)
        result["seconds"] = round(time.monotonic() - begin, 1)
        asked.out.write_text(json.dumps(result, indent=1) + "\n")
    engine.shutdown()


if __name__ == "__main__":
    main()
