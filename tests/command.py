"""The `specgraph` command run in this process, and seen as the caller of a process sees it.

Starting Python and torch takes longer than most commands. What is tested of the process itself (the entry point, its
exit status) starts one: `in_a_process`.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
from itertools import pairwise
from pathlib import Path

import pytest
from specgraph_run.cli import main

Done = subprocess.CompletedProcess[str]


def specgraph(*arguments: object, cwd: Path | None = None, **environ: str) -> Done:
    """Run the command here: what it printed, and the exit status that its process would have."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["specgraph", *map(str, arguments)])
        for name, value in environ.items():
            patch.setenv(name, value)
        if cwd is not None:
            patch.chdir(cwd)
        try:
            main()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except Exception:
            traceback.print_exc(file=err)  # as the interpreter would
            status = 1
    if ("--json", "-") in pairwise(arguments) and status in (0, 130):
        check_keys(str(arguments[0]), json.loads(out.getvalue()))
    return subprocess.CompletedProcess(sys.argv, status, out.getvalue(), err.getvalue())


def check_keys(command: str, report: dict[str, object] | list[dict[str, object]]) -> None:
    """The keys that a command writes are those that docs/stability.md promises."""
    page = (Path(__file__).parents[1] / "docs/stability.md").read_text()
    entry = re.search(rf"^- \*\*{command}\*\*:(.*?)^(?=- |$)", page, re.MULTILINE | re.DOTALL)
    if entry is None:
        assert command == "conformance", f"docs/stability.md has no keys of {command}"
        return
    always, also = (set(re.findall(r"`(\w+)`", part)) for part in entry[1].partition("Where asked for")[::2])
    for each in report if isinstance(report, list) else [report]:
        assert always <= set(each) <= always | also, f"{command}: docs/stability.md against {sorted(each)}"


def in_a_process(*arguments: object, cwd: Path | None = None, **environ: str) -> Done:
    """Run the command in a process of its own."""
    command = [sys.executable, "-c", "from specgraph_run.cli import main; main()", *map(str, arguments)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environ}
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=cwd, check=False)
