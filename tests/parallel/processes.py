"""Starts one process per rank and collects what each returned or raised."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SECONDS = 1200
"""Only ends a test that hangs; nothing is measured."""


def run_ranks(size: int, task: str, **arguments: Any) -> list[dict[str, Any]]:
    """`tasks.TASKS[task](ranks, **arguments)` on `size` ranks.

    Returns:
        By rank: {"result": ...}, or {"error": type, "message": ...}. `exit` is the exit status of a rank that wrote
        neither.
    """
    paths = [str(HERE.parent), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    with tempfile.TemporaryDirectory() as folder:
        out = [Path(folder) / f"{rank}.json" for rank in range(size)]
        given = json.dumps({"task": task, "size": size, "store": f"{folder}/store", "arguments": arguments})
        started = [
            subprocess.Popen(
                [sys.executable, "-u", "-m", "parallel.tasks", str(rank), str(out[rank]), given], env=environment
            )
            for rank in range(size)
        ]
        try:
            status = [process.wait(SECONDS) for process in started]
        finally:
            for process in started:
                process.kill()
        return [
            json.loads(path.read_text()) if path.exists() else {"exit": code}
            for path, code in zip(out, status, strict=True)
        ]


def results(size: int, task: str, **arguments: Any) -> list[Any]:
    """As `run_ranks`, where every rank must return."""
    found = run_ranks(size, task, **arguments)
    for rank, each in enumerate(found):
        assert "result" in each, f"rank {rank}: {each}"
    return [each["result"] for each in found]
