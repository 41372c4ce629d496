"""Checks submitted reports without their devices."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specgraph.errors import ConfigError

from specgraph_conformance.report import OUTCOMES, Report, digest_of, from_json
from specgraph_conformance.sources import digest_at
from specgraph_conformance.standard import expected_ids, justification, unknown_version

SHOWN = 5
CORE = ("specgraph-core", "specgraph-conformance")


def read_report(path: Path) -> tuple[Report, dict[str, Any]]:
    """Return a report, and the data that it was read from.

    Raises:
        ConfigError: the file can't be read, is no JSON, or lacks a field of a report.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        report = from_json(data)
        _check_types(report, data)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    except KeyError as error:
        raise ConfigError(f"{path}: no report of the suite: it has no field {error}") from error
    except (TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: no report of the suite: {error}") from error
    return report, data


def _check_types(report: Report, data: dict[str, Any]) -> None:
    for name, kind in (("digest", str), ("counts", dict), ("problems", list), ("passed", dict), ("cases", list)):
        if not isinstance(data[name], kind):
            raise TypeError(f"field '{name}' must be a {kind.__name__}, got {type(data[name]).__name__}")
    for result in report.cases:
        if result.outcome not in OUTCOMES:
            raise TypeError(f"case {result.id} has the outcome {result.outcome!r}; there are {', '.join(OUTCOMES)}")
    for name, about in report.subject.capabilities.items():
        if set(about) != {"level", "reason"} or about["level"] not in ("yes", "no", "quirk"):
            raise TypeError(f"capability {name} must have a level (yes, no, quirk) and a reason, got {about!r}")


def problems_of(report: Report, data: dict[str, Any], checkout: Path | None = None) -> list[str]:
    """Return the problems of a report, one line each. Empty if it can be accepted.

    Args:
        data: the data that `read_report` returned with it.
        checkout: a clone of the repository of core and suite. If it has the report's commit, the digests of the sources
            are compared with it.
    """
    found: list[str] = []
    if data["digest"] != digest_of(data):
        found.append("its digest is not that of its content: it was edited or cut after the run")
    if data["counts"] != report.counts:
        found.append(f"its counts are {data['counts']}, and its cases make {report.counts}")
    found += [f"failed: {failure.id}" for failure in report.failures]
    found += report.problems
    return _shortened(found) + _case_problems(report) + _source_problems(report, checkout)


def _case_problems(report: Report) -> list[str]:
    """Compare the cases with the standard's, and absences with the capabilities. Return the problems."""
    subject = report.subject
    if other := unknown_version(subject.suite):
        return [other]
    expected = expected_ids(subject.attention, subject.suite)
    ids = [result.id for result in report.cases]
    missing = [f"case {id} of suite {subject.suite} is not in it" for id in expected if id not in set(ids)]
    unknown = [f"there is no case {id} in suite {subject.suite}" for id in ids if id not in expected]
    twice = [f"case {id} is in it twice" for id in dict.fromkeys(ids) if ids.count(id) > 1]
    absent = [r for r in report.cases if r.outcome == "absent" and r.id in expected]
    unjustified = [
        f"case {result.id} is absent, and no capability of the report says so: {result.reason}"
        for result in absent
        if justification(result, expected[result.id], report) is None
    ]
    return _shortened(missing) + _shortened(unknown) + _shortened(twice) + _shortened(unjustified)


def _source_problems(report: Report, checkout: Path | None) -> list[str]:
    """Check environment, commits and uncommitted changes. Return the problems."""
    found = [f"its environment does not say {name}" for name in ("python", "system", "machine", "date")
             if not report.subject.environment.get(name)]  # fmt: skip
    if "torch" not in report.subject.versions:
        found.append("its versions do not say torch")
    sources = {source["distribution"]: source for source in report.subject.sources}
    found += [f"it does not say which {name} ran" for name in CORE if name not in sources]
    for name, source in sources.items():
        if source["state"] not in ("commit", "wheel"):
            found.append(f"{name} ran from neither a git repository nor a wheel: nobody can tell which code it was")
        elif source["changed"]:
            files = ", ".join(source["changed"][:SHOWN])
            found.append(
                f"{name} ran with {len(source['changed'])} changed files that its {source['state']} has not: {files}"
            )
        elif source["state"] == "commit" and checkout is not None:
            there = digest_at(checkout, source["commit"], source["package"])
            if there is not None and there != source["digest"]:
                found.append(f"{name} was not what commit {source['commit'][:12]} of this repository has")
    return found


def _shortened(lines: Sequence[str]) -> list[str]:
    return [*lines[:SHOWN], *([f"... and {len(lines) - SHOWN} more of this kind"] if len(lines) > SHOWN else [])]
