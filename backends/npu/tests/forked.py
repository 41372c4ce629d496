"""Processes of their own for code that ends a process or its task queue. Each is forked from one that is itself a fork
of the tests' process: torch and torch_npu are imported there, which takes seconds, and nothing has used the device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import traceback
from pathlib import Path
from typing import Any

import ascendsim


class Forked:
    """The process that forks. Make it before anything uses the device: threads are not forked."""

    def __init__(self, runtime: ascendsim.Runtime) -> None:
        import torch_npu  # noqa: F401

        import draft.on_platform  # noqa: F401

        theirs, ours = os.pipe()
        answers, answer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(ours)
            serve(runtime, theirs, answer)
        os.close(theirs)
        os.close(answer)
        self.requests, self.answers = os.fdopen(ours, "w"), os.fdopen(answers)

    def run(self, code: str, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
        """Run `code`, which finds `runtime` loaded, with changes of the environment; `folder` is for its output."""
        request = {"code": textwrap.dedent(code), "folder": str(folder), "environment": environment}
        print(json.dumps(request), file=self.requests, flush=True)
        status = self.answers.readline()
        out, err = ((folder / name).read_text(errors="replace") for name in ("stdout", "stderr"))
        return subprocess.CompletedProcess([], int(status), out, err)

    def close(self) -> None:
        self.requests.close()
        os.waitpid(self.pid, 0)


def serve(runtime: ascendsim.Runtime, requests: int, answer: int) -> None:
    """Fork for each line of requests, and answer its exit status: 0, or 1 after an exception."""
    names: dict[str, Any] = {"runtime": runtime, "__name__": "__main__"}
    for line in os.fdopen(requests):
        request, status = json.loads(line), 1
        if (child := os.fork()) == 0:
            os.environ.update(request["environment"])
            for number, name in ((1, "stdout"), (2, "stderr")):
                os.dup2(os.open(Path(request["folder"]) / name, os.O_WRONLY | os.O_CREAT), number)
            sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
            try:
                exec(request["code"], names)
                status = 0
            except BaseException:
                traceback.print_exc()
            os._exit(status)
        os.write(answer, f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n".encode())
    os._exit(0)
