"""Writes `standard.json`, the list of the suite's cases.

python -m specgraph_conformance.case_list             writes it, unless the version is released
python -m specgraph_conformance.case_list --freeze    writes it and its digest in standard.py: the version is released
"""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from specgraph_conformance import standard
from specgraph_conformance.plugin import CASE
from specgraph_conformance.run import Selection
from specgraph_conformance.standard import ATTENTION, FROZEN, LIST, SUITE_VERSION, Listed, digest_of, listed_cases


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
    """Return the cases of the suite by id without parameters, as they are on `cpu`."""
    collected = _Collected()
    arguments = [*Selection().arguments("cpu"), "--collect-only"]
    with redirect_stdout(io.StringIO()) as output:
        status = pytest.main(arguments, plugins=[collected])
    if status != 0:
        raise SystemExit(output.getvalue())
    return collected.cases


def as_json(cases: Mapping[str, Listed]) -> str:
    """One case a line; empty fields are left out."""
    lines = [
        f"{json.dumps(id)}: {json.dumps({key: value for key, value in asdict(listed).items() if value})}"
        for id, listed in cases.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> None:
    """Write the list, and with --freeze its digest."""
    cases = as_json(collect())
    if FROZEN and digest_of(cases) != FROZEN:
        raise SystemExit(
            f"suite {SUITE_VERSION} is released, and this is another list: raise SUITE_VERSION, empty FROZEN"
        )
    LIST.write_text(cases, encoding="utf-8")
    if "--freeze" in sys.argv[1:]:
        path = Path(standard.__file__)
        frozen = re.sub(
            r'^FROZEN = ".*"$', f'FROZEN = "{digest_of(cases)}"', path.read_text("utf-8"), flags=re.MULTILINE
        )
        path.write_text(frozen, encoding="utf-8")
    print(f"{LIST}: {len(listed_cases())} cases")


if __name__ == "__main__":
    main()
