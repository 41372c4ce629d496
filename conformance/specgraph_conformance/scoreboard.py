"""Makes the Markdown scoreboard of several platforms from their JSON reports, after verifying each report.

python -m specgraph_conformance.scoreboard conformance/reports/*.json > docs/conformance/README.md
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from specgraph_conformance.case import GROUPS
from specgraph_conformance.render import said
from specgraph_conformance.report import OUTCOMES
from specgraph_conformance.standard import PROFILES, conformance
from specgraph_conformance.verify import problems_of, read_report

ABOUT = """# Scoreboard

Made by `python -m specgraph_conformance.scoreboard` from the reports in `conformance/reports`. Each was checked as
`specgraph conformance verify REPORT` does; what a profile asks for is in
[writing-a-backend.md](../writing-a-backend.md#7-the-standard). Cases with attention run once with
each: the core's two, and those of the device's own.
"""


def scoreboard(paths: Sequence[Path]) -> str:
    """Return a table with one column per report: its verification, profiles, cases and capabilities.

    Raises ConfigError if a file is no report.
    """
    read = [read_report(path) for path in paths]
    reports, subjects = [report for report, _ in read], [report.subject for report, _ in read]
    problems = [problems_of(report, data) for report, data in read]
    answers = [{answer.profile: said(answer).replace("|", "\\|") for answer in conformance(r)} for r in reports]
    counts = [Counter((result.group, result.outcome) for result in report.cases) for report in reports]
    rows = {
        "verified": [f"no: {found[0]}" if found else "yes" for found in problems],
        "suite": [subject.suite for subject in subjects],
        **{profile.name: [answer[profile.name] for answer in answers] for profile in PROFILES},
        "device": [subject.device for subject in subjects],
        "kind of device": [subject.device_kind for subject in subjects],
        "torch": [subject.versions.get("torch", "") for subject in subjects],
        "cases": [str(len(report.cases)) for report in reports],
        **{outcome: [str(report.counts[outcome]) for report in reports] for outcome in OUTCOMES},
        **{f"cases: {group}": [_share(count, group) for count in counts] for group in GROUPS},
    }
    for name in dict.fromkeys(name for subject in subjects for name in subject.capabilities):
        rows[name] = [subject.capabilities.get(name, {}).get("level", "") for subject in subjects]
    head = [ABOUT, f"| | {' | '.join(subject.platform for subject in subjects)} |", "|---|" + "---|" * len(reports)]
    return "\n".join([*head, *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items())]) + "\n"


def _share(counts: Counter[tuple[str, str]], group: str) -> str:
    """Return the number of passed cases out of those that apply."""
    applied = sum(counts[group, outcome] for outcome in OUTCOMES if outcome != "absent")
    return f"{counts[group, 'passed']} of {applied}" if applied else "absent"


def main(paths: Sequence[str]) -> None:
    """Print the scoreboard."""
    sys.stdout.write(scoreboard([Path(path) for path in paths]))


if __name__ == "__main__":
    main(sys.argv[1:])
