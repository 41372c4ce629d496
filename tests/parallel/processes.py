"""Starts one process per rank and collects what each returned or raised."""

from __future__ import annotations

import gc
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from forks import forks
from parallel import disagreements
from parallel.tasks import TASKS
from specgraph_models.parallel import join_ranks

assert disagreements.DIFFER  # its tasks are in the table too
SECONDS = 1200
"""Only ends a test that hangs; nothing is measured."""


def run_rank(size: int, rank: int, store: str, out: Path, task: str, arguments: dict[str, Any]) -> None:
    """One rank. An exception is its result."""
    torch.set_num_threads(1)
    gc.freeze()  # what was loaded before the fork: the collector need not go through all of it again in every process
    try:
        ranks = join_ranks(torch.device("cpu"), size, init_method=f"file://{store}", rank=rank, timeout=120.0)
        with torch.inference_mode():
            result: dict[str, Any] = {"result": TASKS[task](ranks, **arguments)}
    except Exception as error:
        result = {"error": type(error).__name__, "message": str(error)}
    out.write_text(json.dumps(result))
    if "error" not in result:
        ranks.close()


def run_ranks(size: int, task: str, **arguments: Any) -> list[dict[str, Any]]:
    """`TASKS[task](ranks, **arguments)` on `size` ranks.

    Returns:
        By rank: {"result": ...}, or {"error": type, "message": ...}. `exit` is the exit status of a rank that wrote
        neither.
    """
    with tempfile.TemporaryDirectory() as folder:
        store, out = f"{folder}/store", [Path(folder) / f"{rank}.json" for rank in range(size)]
        started = [
            forks().Process(target=run_rank, args=(size, rank, store, out[rank], task, arguments))
            for rank in range(size)
        ]
        for process in started:
            process.start()
        try:
            for process in started:
                process.join(SECONDS)
        finally:
            for process in started:
                process.kill()
        return [
            json.loads(path.read_text()) if path.exists() else {"exit": process.exitcode}
            for path, process in zip(out, started, strict=True)
        ]


def results(size: int, task: str, **arguments: Any) -> list[Any]:
    """The results of `run_ranks`, where every rank must return."""
    found = run_ranks(size, task, **arguments)
    for rank, each in enumerate(found):
        assert "result" in each, f"rank {rank}: {each}"
    return [each["result"] for each in found]
