"""What the suite on `cpu` has besides the cases of earlier minor versions, in the form of `standard/VERSION.json`.

python -m specgraph_conformance.case_list writes the file of the newest version, `standard.SUITE_VERSION`.
"""

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
from specgraph_conformance.standard import ATTENTION, FOLDER, SUITE_VERSION, Listed, earlier_minor_version, listed_cases


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
    """The cases of the suite by id without parameters."""
    collected = _Collected()
    arguments = [*Selection().arguments("cpu"), "--collect-only"]
    with redirect_stdout(io.StringIO()) as output:
        status = pytest.main(arguments, plugins=[collected])
    if status != 0:
        raise SystemExit(output.getvalue())
    return collected.cases


def removed(earlier: Mapping[str, Listed], cases: Mapping[str, Listed]) -> list[str]:
    """Cases and parameter sets of an earlier version that are missing or changed: no minor version may do that."""
    out: list[str] = []
    for id, before in earlier.items():
        now = cases.get(id)
        if now is None:
            out.append(f"{id} is not there")
        elif (before.needs, before.unless) != (now.needs, now.unless):
            out.append(f"{id} has other needs")
        elif bool(before.parameters) != bool(now.parameters):
            out.append(f"{id} has {'no' if before.parameters else 'now'} parameter sets")
        else:
            out += [f"{id}[{each}] is not there" for each in before.parameters if each not in now.parameters]
    return out


def added(earlier: Mapping[str, Listed], cases: Mapping[str, Listed]) -> dict[str, Listed]:
    """New cases, and the new parameter sets of earlier ones."""
    out: dict[str, Listed] = {}
    for id, now in cases.items():
        before = earlier.get(id)
        if before is None:
            out[id] = now
        elif new := tuple(each for each in now.parameters if each not in before.parameters):
            out[id] = Listed(parameters=new)
    return out


def as_json(cases: Mapping[str, Listed]) -> str:
    """One case a line; empty fields are left out."""
    lines = [
        f"{json.dumps(id)}: {json.dumps({key: value for key, value in asdict(listed).items() if value})}"
        for id, listed in cases.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> None:
    """Write the list of the newest version.

    Raises:
        SystemExit: a case of an earlier minor version is not there any more, or has changed.
    """
    earlier = listed_cases(earlier_minor_version(SUITE_VERSION) or "") or {}
    cases = collect()
    if lost := removed(earlier, cases):
        raise SystemExit(f"these changes take a new major version of the suite: {'; '.join(lost)}")
    path = FOLDER / f"{SUITE_VERSION}.json"
    path.write_text(as_json(added(earlier, cases)), encoding="utf-8")
    print(f"{path}: {len(added(earlier, cases))} cases")


if __name__ == "__main__":
    main()
