"""Is a merged propose ever slower than a step-by-step one? Several captures of each, since two captures differ too.

    python benchmarks/step_against_merged.py --platform cuda --json FILE

The same graph captured twice may differ by a percent, by where its buffers lie. A capture counts with its median.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from specgraph.device import open_platform
from specgraph.tools.propose import BenchCase, bench_propose


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--platform", default=None)
    parser.add_argument("--shape", default="eagle3-llama3-8b")
    parser.add_argument("--requests", default="1,8,32,64")
    parser.add_argument("-k", type=int, default=5)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--captures", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", default="")
    a = parser.parse_args()
    platform, rows = open_platform(a.platform), []
    for requests in map(int, a.requests.split(",")):
        case = BenchCase(
            shape=a.shape, requests=requests, k=a.k, context=a.context, repeats=a.repeats,
            lowerings=("step", "merged") * a.captures, torch_ops=False,
        )  # fmt: skip
        times = bench_propose(platform, case, dtype=getattr(torch, a.dtype))
        ways = {way: [row["device_us"] for row in times if row["lowering"] == way] for way in ("step", "merged")}
        rows.append({"requests": requests, **ways})
        print(json.dumps(rows[-1]), flush=True)
    report = {
        "device": platform.info.device_name, "versions": dict(platform.info.versions), "shape": a.shape, "k": a.k,
        "context": a.context, "dtype": a.dtype,
        "command": "python benchmarks/step_against_merged.py " + " ".join(sys.argv[1:]), "rows": rows,
    }  # fmt: skip
    if a.json:
        Path(a.json).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
