"""The scoreboard of several platforms in Markdown, made from their JSON reports, each of which is verified first.

python -m specgraph_conformance.scoreboard docs/conformance/*.json > docs/conformance/README.md
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from specgraph.errors import ConfigError

from specgraph_conformance.case import GROUPS
from specgraph_conformance.merge import shard_problems
from specgraph_conformance.render import said
from specgraph_conformance.report import OUTCOMES
from specgraph_conformance.standard import PROFILES, conformance
from specgraph_conformance.verify import problems_of, read_report

ABOUT = """# Scoreboard

Made by `python -m specgraph_conformance.scoreboard` from the reports in this folder. Each was checked as
`specgraph conformance verify REPORT` does; what a profile asks for is in
[writing-a-backend.md](../writing-a-backend.md#7-the-standard). A report is judged by the list of the suite version that
made it. Cases with attention run once with each: the core's two, and those of the device's own.
"""


def scoreboard(paths: Sequence[Path]) -> str:
    """One column per report: whether it is verified, what it conforms to, cases by outcome and group, capabilities."""
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    lines = [ABOUT, f"| | {' | '.join(report['platform'] for report in reports)} |", "|---|" + "---|" * len(reports)]
    lines.append(f"| verified | {' | '.join(_verified(path) for path in paths)} |")
    answers = [_profiles(path) for path in paths]
    lines.append(f"| suite | {' | '.join(report.get('suite', 'not stated') for report in reports)} |")
    lines += [f"| {p.name} | {' | '.join(a[p.name] for a in answers)} |" for p in PROFILES]
    lines.append(f"| device | {' | '.join(report['device'] for report in reports)} |")
    lines.append(f"| kind of device | {' | '.join(r.get('device_kind', 'not in this report') for r in reports)} |")
    lines.append(f"| torch | {' | '.join(report['versions'].get('torch', '') for report in reports)} |")
    lines.append(f"| cases | {' | '.join(str(len(r['cases'])) for r in reports)} |")
    lines += [f"| {o} | {' | '.join(str(report['counts'][o]) for report in reports)} |" for o in OUTCOMES]
    for group in GROUPS:
        cells = [Counter(c["outcome"] for c in report["cases"] if c["group"] == group) for report in reports]
        shares = [f"{n['passed']} of {n.total() - n['absent']}" if n.total() > n["absent"] else "absent" for n in cells]
        lines.append(f"| cases: {group} | {' | '.join(shares)} |")
    for name in dict.fromkeys(name for report in reports for name in report["capabilities"]):
        levels = [report["capabilities"].get(name, {}).get("level", "") for report in reports]
        lines.append(f"| {name} | {' | '.join(levels)} |")
    return "\n".join(lines) + "\n"


def _verified(path: Path) -> str:
    try:
        report, data = read_report(path)
    except ConfigError:
        return "no: made before suite 1.0"
    problems = problems_of(report, data) + shard_problems(report)
    return f"no: {problems[0]}" if problems else "yes"


def _profiles(path: Path) -> dict[str, str]:
    try:
        report, _ = read_report(path)
    except ConfigError:
        return {profile.name: "not known" for profile in PROFILES}
    return {answer.profile: said(answer).replace("|", "\\|") for answer in conformance(report)}


def main(paths: Sequence[str]) -> None:
    """Print it."""
    sys.stdout.write(scoreboard([Path(path) for path in paths]))


if __name__ == "__main__":
    main(sys.argv[1:])
