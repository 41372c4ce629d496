"""Times the start-up of a drafter, or of a target and its drafter, that capture a ladder of batch sizes.

Run as a program with the fields of a `StartupCase` in JSON, this module captures once and prints a row.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch

from specgraph.attention import choose_attention
from specgraph.capture import ModelRunner, report_captures
from specgraph.device import Platform, open_platform
from specgraph.draft import DraftConfig
from specgraph.engine import EngineConfig, SpeculativeDecoder
from specgraph.errors import PlatformError
from specgraph.options import dtype_named
from specgraph.tools.rounds import random_target, target_shape
from specgraph.tools.shapes import lone_drafter, random_head, shape_named


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupCase:
    """A ladder of batch sizes that is captured, and for which models."""

    platform: str | None
    shape: str
    """The drafter's, by name."""
    target: str | None
    """The target's, by name: rounds are captured. None: the drafter's proposes alone."""
    sizes: Sequence[int]
    k: int
    context: int
    """Tokens per request."""
    dtype: str


def measure_startup(case: StartupCase) -> list[dict[str, Any]]:
    """Capture twice, each time in a process of its own: with an empty folder of compiled kernels, and with the first's.

    Returns:
        One row per process, with `cache` cold or warm and the columns of `captured`.

    Raises:
        PlatformError: a process failed.
    """
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "TRITON_CACHE_DIR": folder}
        for cache in ("cold", "warm"):
            command = [sys.executable, "-m", __name__, json.dumps(asdict(case))]
            done = subprocess.run(command, env=path, stdout=subprocess.PIPE, text=True, check=False)
            if done.returncode:
                raise PlatformError(f"the process that captures with a {cache} cache failed: exit {done.returncode}")
            rows.append({"cache": cache, **json.loads(done.stdout.splitlines()[-1])})
    return rows


def captured(platform: Platform, case: StartupCase) -> dict[str, Any]:
    """Capture, and return what it took.

    `seconds` are `compile_s`, the wait for kernels that are compiled ahead, and `capture_s`: warm-up runs, captures and
    all else. `memory_mb` is what all graphs took of the device's memory (MiB), `further_mb` the most that a graph of a
    smaller size took beside a larger one of its program; `graph_mb` lists them all, in the order of capture.
    """
    runners = _runners(platform, case)
    used, memory = [_used(platform)], platform.memory().reserved
    start = time.perf_counter()

    def progress(what: str, done: int, total: int) -> None:
        if what == "capturing":
            used.append(_used(platform))

    for runner in runners:
        runner.capture(report_captures(runners, progress))
    platform.synchronize()
    seconds, compiling = time.perf_counter() - start, sum(runner.compile_seconds for runner in runners)
    programs = [program for runner in runners for program, _, _ in runner.captures()]
    grown = [round((after - before) / 2**20, 1) for before, after in pairwise(used)]
    further = [mb for mb, (before, program) in zip(grown[1:], pairwise(programs), strict=True) if program is before]
    return {
        "sizes": len(case.sizes), "graphs": len(programs), "seconds": round(seconds, 2),
        "compile_s": round(compiling, 2), "capture_s": round(seconds - compiling, 2),
        "memory_mb": round((used[-1] - used[0]) / 2**20, 1),
        "reserved_mb": round((platform.memory().reserved - memory) / 2**20, 1),
        "further_mb": max(further, default=0.0), "graph_mb": grown,
    }  # fmt: skip


def _runners(platform: Platform, case: StartupCase) -> list[ModelRunner]:
    dtype = dtype_named(case.dtype) or torch.float32
    length = case.context + 2 * (case.k + 1)
    head = random_head(shape_named(case.shape), platform.device, dtype, length)
    limits: dict[str, Any] = {
        "num_speculative_tokens": case.k, "max_num_requests": max(case.sizes), "max_model_len": length,
        "capture_sizes": list(case.sizes),
    }  # fmt: skip
    target = None if case.target is None else random_target(target_shape(case.target), platform.device, dtype, length)
    layers = [*(target.attention_layers if target is not None else ()), *head.attention_layers]
    attention = choose_attention("auto", platform, layers, dtype).backend
    limits["block_size"] = attention.preferred_block_size
    if target is None:
        return [lone_drafter(platform, head, DraftConfig(**limits), attention)]
    decoder = SpeculativeDecoder(target, head, platform, EngineConfig(**limits), attention=attention)
    return list(decoder.runners.values())


def _used(platform: Platform) -> int:
    """Return the bytes of the device's memory that are not free, whoever holds them."""
    now = platform.memory()
    return now.total - (now.free - now.reserved + now.allocated)


if __name__ == "__main__":
    asked = StartupCase(**json.loads(sys.argv[1]))
    with torch.inference_mode():
        print(json.dumps(captured(open_platform(asked.platform), asked)))
