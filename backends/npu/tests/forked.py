"""Processes of their own for code that ends a process or its task queue: each is forked from one that has imported
torch and torch_npu on the simulated runtime and done nothing else, which takes seconds.

    python -u forked.py BUILD FLAVOUR    forks for each line of standard input, and prints the exit status of each fork
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import ascendsim


class Forked:
    """The process that forks, in one flavour of the runtime."""

    def __init__(self, build: Path, flavour: ascendsim.Flavour) -> None:
        command = [sys.executable, "-u", "-W", "ignore", __file__, str(build), flavour]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True
        )

    def run(self, code: str, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
        """Run `code`, which finds `runtime` loaded, with changes of the environment; `folder` is for its output."""
        request = {"code": textwrap.dedent(code), "folder": str(folder), "environment": environment}
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        status = self.process.stdout.readline()
        out, err = ((folder / name).read_text(errors="replace") for name in ("stdout", "stderr"))
        return subprocess.CompletedProcess([], int(status), out, err)

    def close(self) -> None:
        self.process.communicate()


def serve(build: str, flavour: ascendsim.Flavour) -> None:
    """Fork for each line of standard input; a fork leaves by running its code to the end, or by its exception."""
    names: dict[str, Any] = {"runtime": ascendsim.load(build, flavour), "__name__": "__main__"}
    import torch_npu  # noqa: F401

    import draft.on_platform  # noqa: F401

    for line in sys.stdin:
        request = json.loads(line)
        if (child := os.fork()) == 0:
            os.environ.update(request["environment"])
            for number, name in ((1, "stdout"), (2, "stderr")):
                os.dup2(os.open(Path(request["folder"]) / name, os.O_WRONLY | os.O_CREAT), number)
            exec(request["code"], names)
            return
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


if __name__ == "__main__":
    serve(*sys.argv[1:3])  # type: ignore[arg-type]
