"""Writes the list of the cases that this version of the suite adds to the earlier versions.

python -m specgraph_conformance.case_list             writes it, unless the version is released
python -m specgraph_conformance.case_list --freeze    writes it and its digest: the version is released
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from typing import Any

import pytest

from specgraph_conformance.plugin import CASE
from specgraph_conformance.run import Selection
from specgraph_conformance.standard import (
    ATTENTION,
    FROZEN,
    LISTS,
    SUITE_VERSION,
    VERSIONS,
    Listed,
    digest_of,
    listed_cases,
)


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


def added(cases: Mapping[str, Listed], before: Mapping[str, Listed]) -> dict[str, Listed]:
    """Return the cases and parameter sets that are in `cases` but not in `before`. A case with other capabilities in
    `needs` or `unless` is new."""
    out: dict[str, Listed] = {}
    for id, listed in cases.items():
        old = before.get(id)
        if old is None or (old.needs, old.unless) != (listed.needs, listed.unless):
            out[id] = listed
        elif parameters := tuple(each for each in listed.parameters if each not in old.parameters):
            out[id] = replace(listed, parameters=parameters)
    return out


def main() -> None:
    """Write the list. With --freeze, write its digest too."""
    cases = collect()
    before = listed_cases(VERSIONS[-2]) if VERSIONS[1:] else {}
    if gone := added(before, cases):
        raise SystemExit(f"released cases are gone or ask for something else, so this is a new major version: {gone}")
    path, text = LISTS / f"{SUITE_VERSION}.json", as_json(added(cases, before))
    if FROZEN.get(SUITE_VERSION, digest_of(text)) != digest_of(text):
        raise SystemExit(f"suite {SUITE_VERSION} is released with other cases: raise SUITE_VERSION in standard.py")
    path.write_text(text, encoding="utf-8")
    if "--freeze" in sys.argv[1:]:
        frozen = json.dumps({**FROZEN, SUITE_VERSION: digest_of(text)}, indent=2)
        (LISTS / "frozen.json").write_text(f"{frozen}\n", encoding="utf-8")
    print(f"{path}: {len(added(cases, before))} of {len(cases)} cases")


if __name__ == "__main__":
    main()
