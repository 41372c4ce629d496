"""The forms of a report: a table for the terminal, the same in a Markdown document, and JSON."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from rich.console import Console, Group
from rich.markup import escape as plain
from rich.table import Table
from rich.text import Text
from specgraph.errors import ConfigError
from specgraph_run.cli.interrupts import finished_first

from specgraph_conformance.case import GROUPS
from specgraph_conformance.diagnosis import by_cause, look_at
from specgraph_conformance.report import OUTCOMES, CaseResult, Report, as_record
from specgraph_conformance.standard import Conformance, conformance, expected_ids, summary, unknown_version

SHOWN = 8
"""The number of failure causes that the terminal shows, in the order of the suite: the first ones are to be fixed
first."""

NAMED = 4
"""The number of cases that the terminal names of those that failed alike."""


def as_table(report: Report) -> Group:
    """Return a table: counts by group, then failures with advice, then absent cases with reasons."""
    subject = report.subject
    table = Table(title=plain(_title(report)), title_justify="left")
    table.add_column("group")
    for outcome in OUTCOMES:
        table.add_column(outcome, justify="right")
    by_group = _by_group(report)
    for group in GROUPS:
        if counts := by_group.get(group):
            table.add_row(group, *(str(counts[outcome] or "") for outcome in OUTCOMES))
    table.add_section()
    table.add_row("all", *(str(report.counts[outcome]) for outcome in OUTCOMES))
    lines = [Text(f"versions: {_pairs(subject.versions)}; seed {subject.seed}")]
    groups = by_cause(report.failures)
    for first, *others in groups[:SHOWN]:
        lines.append(Text(f"\nfailed {first.id}: look at: {look_at(first)}", style="bold red"))
        lines.append(Text(f"  property: {first.property}\n  seen:     {first.reason}"))
        lines.append(Text(f"  hazard:   {first.hazard or 'none'}"))
        if others:
            lines.append(Text(f"  as well:  {len(others)} more that saw the same: {_few(report, others)}"))
        lines.append(Text(f"  again:    {report.rerun_command(first)}"))
    if rest := [result for group in groups[SHOWN:] for result in group]:
        causes = f"of {len(groups) - SHOWN} other causes"
        lines.append(Text(f"\nand {len(rest)} more {causes}, in the JSON and Markdown reports: {_few(report, rest)}\n"))
    for outcome, said in (("xfailed", "declared gap"), ("absent", "not run")):
        for reason in dict.fromkeys(r.reason for r in report.cases if r.outcome == outcome):
            found = [r for r in report.cases if r.outcome == outcome and r.reason == reason]
            lines.append(Text(f"{said}: {_counted(found)}, because {reason}", style="dim"))
    lines += [Text(problem, style="bold red") for problem in report.problems]
    lines += [Text(f"{profile}: {answer}") for profile, answer in profile_lines(report)]
    return Group(table, *lines, Text(verdict(report), style="bold"))


def verdict(report: Report) -> str:
    """Return the verdict in one line."""
    name, counts = report.subject.platform, report.counts
    numbers = f"{counts['passed']} passed, {counts['xfailed']} declared gaps, {counts['absent']} absent"
    if report.failures:
        return f"{name} does not conform: {counts['failed']} failed; begin with {report.failures[0].id}"
    if not report.is_green:
        return f"{name} does not conform: " + ("; ".join(report.problems) or "no case ran")
    if profiles := summary(report):
        return f"{name} conforms to {profiles}: {numbers}"
    return f"{name} passes the cases that were run: {numbers}; {_left_out(report)}"


def _left_out(report: Report) -> str:
    """Say which groups were not run, and which ran only in part."""
    if other := unknown_version(report.subject.suite):
        return other
    expected = expected_ids(report.subject.attention, report.subject.suite)
    ran, listed = _by_group(report), Counter(id.partition(".")[0] for id in expected)
    none = [group for group in GROUPS if listed[group] and group not in ran]
    part = [group for group in GROUPS if group in ran and ran[group].total() < listed[group]]
    said = [f"{words} {', '.join(groups)}" for words, groups in (("none of", none), ("a part of", part)) if groups]
    return f"it ran {' and '.join(said)}" if said else "it ran all of them"


def profile_lines(report: Report) -> list[tuple[str, str]]:
    """Return (profile and version, answer) for each profile; see `said`."""
    version = report.subject.suite
    return [(f"{answer.profile} {version}", said(answer)) for answer in conformance(report)]


def said(answer: Conformance) -> str:
    """Return the text of an answer: "conforms", or the missing things."""
    if answer.conforms:
        return "conforms"
    rest = f"; and {len(answer.missing) - 3} more" if len(answer.missing) > 3 else ""
    return f"{'missing' if answer.claimed else 'not claimed'}: {'; '.join(answer.missing[:3])}{rest}"


def as_markdown(report: Report) -> str:
    """Return a Markdown document with the table of the terminal."""
    text = io.StringIO()
    print_report(report, text)
    return f"# Conformance of `{report.subject.platform}`\n\n{verdict(report)}.\n\n```\n{text.getvalue()}```\n"


def as_json(report: Report) -> str:
    """Return `as_record` as JSON with a line per field, group, and case that did not pass, so that a diff of two
    reports names the differences."""
    data = as_record(report)
    passed = ",\n".join(f"{json.dumps(group)}: {json.dumps(ids)}" for group, ids in data.pop("passed").items())
    cases = ",\n".join(json.dumps(case) for case in data.pop("cases"))
    fields = "".join(f"{json.dumps(name)}: {json.dumps(value)},\n" for name, value in data.items())
    return f'{{\n{fields}"passed": {{\n{passed}\n}},\n"cases": [\n{cases}\n]\n}}\n'


def check_writable(path: Path) -> None:
    """Check, before the run, that a report can be written. Raises ConfigError if not."""
    if not path.parent.is_dir():
        raise ConfigError(f"{path} can't be written: there is no folder {path.parent}")
    existed = path.exists()
    with finished_first():  # an interrupt must leave no empty file
        try:
            path.open("ab").close()  # permission bits alone don't show it
        except OSError as error:
            raise ConfigError(f"{path} can't be written: {error.strerror or error}") from error
        if not existed:
            path.unlink()


def print_report(report: Report, file: TextIO) -> None:
    """Print the report as a table."""
    Console(file=file, soft_wrap=True).print(as_table(report))


def _title(report: Report) -> str:
    subject = report.subject
    return f"{subject.platform} on {subject.device} ({subject.device_kind})"


def _named(results: Sequence[CaseResult]) -> str:
    """Return the names of the cases, each once. A case has its parameters if only one set of them is in `results`."""
    by_case: dict[str, list[str]] = {}
    for result in results:
        by_case.setdefault(result.id.partition("[")[0], []).append(result.id)
    return ", ".join(ids[0] if len(ids) == 1 else f"{case} ({len(ids)})" for case, ids in by_case.items())


def _few(report: Report, results: Sequence[CaseResult]) -> str:
    """Return the names of the cases. Of many, return the first ones and the command that runs the groups of all."""
    names = _named(results).split(", ")
    if len(names) <= NAMED:
        return ", ".join(names)
    groups = "".join(f" --group {group}" for group in dict.fromkeys(result.group for result in results))
    command = f"specgraph conformance {report.subject.platform}{groups}"
    return f"{', '.join(names[:NAMED])} and {len(names) - NAMED} other cases ({command})"


def _counted(results: Sequence[CaseResult]) -> str:
    """Return the name of the case. For several cases, return their number and groups."""
    if len(results) == 1:
        return results[0].id
    return f"{len(results)} cases of {', '.join(dict.fromkeys(result.group for result in results))}"


def _by_group(report: Report) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    for result in report.cases:
        found.setdefault(result.group, Counter())[result.outcome] += 1
    return found


def _pairs(mapping: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in mapping.items())
