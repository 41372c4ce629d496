"""The list of the suite's cases in the form of `standard/VERSION.json`, as the suite on `cpu` has them.

python -m specgraph_conformance.case_list > conformance/specgraph_conformance/standard/1.0.json
"""

from __future__ import annotations

import io
import json
import sys
from contextlib import redirect_stdout
from typing import Any

import pytest

from specgraph_conformance.plugin import CASE
from specgraph_conformance.run import Selection
from specgraph_conformance.standard import ATTENTION


class _Collected:
    def __init__(self) -> None:
        self.cases: dict[str, dict[str, list[str]]] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            found = item.stash[CASE]
            about = self.cases.setdefault(
                found.id.partition("[")[0], {"needs": [*found.needs], "unless": [*found.unless], "parameters": []}
            )
            callspec: Any = getattr(item, "callspec", None)
            attention = None if callspec is None else callspec.params.get("attention")
            if callspec is not None and attention in (None, "paged"):
                parts = callspec.id.split("-")
                if attention is not None:
                    parts[parts.index(attention)] = ATTENTION
                about["parameters"].append("-".join(parts))


def collect() -> str:
    """JSON, one case a line; empty fields are left out."""
    collected = _Collected()
    arguments = [*Selection().arguments("cpu"), "--collect-only"]
    with redirect_stdout(io.StringIO()) as output:
        status = pytest.main(arguments, plugins=[collected])
    if status != 0:
        raise SystemExit(output.getvalue())
    lines = [
        f"{json.dumps(id)}: {json.dumps({key: value for key, value in about.items() if value})}"
        for id, about in collected.cases.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    sys.stdout.write(collect())
