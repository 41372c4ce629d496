"""Which functions each conformance case enters, and how long it takes: a case that never enters a function can't fail
for a mutant in it.

python tests/mutation/reach.py REACH.json          (in the root of a copy of the repository; runs the suite on `cpu`)
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

IMPORT = "import"
"""In place of a case: what is entered before the first case runs."""


class Reach:
    """A pytest plugin that notes (file, function) of every Python function entered under `folder`."""

    def __init__(self, folder: Path) -> None:
        self.prefix = f"{folder}/"
        self.case = IMPORT
        self.entered: dict[str, set[tuple[str, str]]] = {IMPORT: set()}
        self.seconds: dict[str, float] = {}

    def trace(self, frame: FrameType, event: str, arg: Any) -> None:
        """For `sys.settrace`; returns None, so that no line is traced."""
        code = frame.f_code
        if code.co_filename.startswith(self.prefix):
            self.entered[self.case].add((code.co_filename[len(self.prefix) :], code.co_qualname))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        from specgraph_conformance.plugin import CASE

        self.case = item.stash[CASE].id
        self.entered[self.case] = set()
        begin = time.process_time()
        sys.settrace(self.trace)
        threading.settrace(self.trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)  # pyright: ignore[reportArgumentType]
            self.seconds[self.case] = time.process_time() - begin


def main(path: str) -> None:
    """Run the suite and write {"seconds": {case: CPU seconds}, "cases": {"file function": [case, ...]}}."""
    reach = Reach(Path.cwd() / "specgraph")
    sys.settrace(reach.trace)
    from specgraph_conformance.run import Selection

    status = pytest.main([*Selection().arguments("cpu"), "--specgraph-timeout", "3600"], plugins=[reach])
    if status != 0:
        raise SystemExit("the suite fails without a mutant")
    cases: dict[str, list[str]] = {}
    for case, functions in reach.entered.items():
        for file, function in sorted(functions):
            cases.setdefault(f"specgraph/{file} {function}", []).append(case)
    Path(path).write_text(json.dumps({"seconds": reach.seconds, "cases": cases}))


if __name__ == "__main__":
    main(sys.argv[1])
