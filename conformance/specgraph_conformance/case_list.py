"""Writes the list of the cases of this version of the suite: python -m specgraph_conformance.case_list"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from typing import Any

import pytest

from specgraph_conformance.plugin import CASE
from specgraph_conformance.run import Selection
from specgraph_conformance.standard import ATTENTION, LISTS, SUITE_VERSION, Listed


class _Collected:
    def __init__(self) -> None:
        self.cases: dict[str, Listed] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            found = item.stash[CASE]
            id = found.id.partition("[")[0]
            listed = self.cases.setdefault(id, Listed(found.needs, found.unless))
            callspec: Any = getattr(item, "callspec", None)
            attention = None if callspec is None else callspec.params.get("attention")
            if callspec is not None and attention in (None, "paged"):
                parts = callspec.id.split("-")
                if attention is not None:
                    parts[parts.index(attention)] = ATTENTION
                self.cases[id] = replace(listed, parameters=(*listed.parameters, "-".join(parts)))


def collect() -> dict[str, Listed]:
    """Return the suite's cases on `cpu`, by id without parameters."""
    collected = _Collected()
    arguments = [*Selection().arguments("cpu"), "--collect-only"]
    with redirect_stdout(io.StringIO()) as output:
        status = pytest.main(arguments, plugins=[collected])
    if status != 0:
        raise SystemExit(output.getvalue())
    return collected.cases


def as_json(cases: Mapping[str, Listed]) -> str:
    """Return JSON with one case per line, without empty fields."""
    lines = [
        f"{json.dumps(id)}: {json.dumps({key: value for key, value in asdict(listed).items() if value})}"
        for id, listed in cases.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> None:
    """Write the list."""
    cases, path = collect(), LISTS / f"{SUITE_VERSION}.json"
    path.write_text(as_json(cases), encoding="utf-8")
    print(f"{path}: {len(cases)} cases")


if __name__ == "__main__":
    main()
