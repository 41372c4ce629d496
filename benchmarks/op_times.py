"""Times of single ops by batch size, each measured inside a graph: what the scripts about ops share."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from specgraph.device import Platform, open_platform
from specgraph.tools.timing import device_time

CALLS = 10
"""Calls per graph, so that the launch of the graph does not count."""


def in_a_graph(platform: Platform, call: Callable[[], Any]) -> float:
    """Microseconds of one of CALLS calls that one graph replays."""
    call()
    graph = platform.graph()
    with graph.capture():
        for _ in range(CALLS):
            call()
    found = median(device_time(platform, graph.replay, repeats=20)) / CALLS
    graph.reset()
    return round(found, 1)


def measure(row: Callable[[Platform, int, argparse.Namespace], dict[str, Any]], script: str, **numbers: int) -> None:
    """Measure, print, write: the whole command.

    Args:
        row: gives the times of one batch size, from the platform, the number of requests and the arguments.
        script: its file name, for the command in the result file.
        numbers: further integer options with their defaults.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--platform", default=None)
    parser.add_argument("--shape", default="eagle3-llama3-8b")
    parser.add_argument("--requests", default="1,8,32,64")
    parser.add_argument("-k", type=int, default=5)
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", default="")
    a = parser.parse_args()
    platform = open_platform(a.platform)
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for requests in map(int, a.requests.split(",")):
            rows.append(row(platform, requests, a))
            print(json.dumps(rows[-1]), flush=True)
    report = {
        "device": platform.info.device_name, "versions": dict(platform.info.versions), "shape": a.shape, "k": a.k,
        "dtype": a.dtype, "command": f"python benchmarks/{script} " + " ".join(sys.argv[1:]), "rows": rows,
    }  # fmt: skip
    if a.json:
        Path(a.json).write_text(json.dumps(report, indent=1))
