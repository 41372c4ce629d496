"""A support matrix in Markdown, from the JSON reports of several platforms.

python -m specgraph_conformance.matrix docs/conformance/*.json > docs/conformance/README.md
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specgraph_conformance.case import GROUPS
from specgraph_conformance.report import OUTCOMES


def support_matrix(reports: Sequence[dict[str, Any]]) -> str:
    """One column per report: device, counts, capabilities, and passed cases of those that apply by group."""
    lines = [
        "# Support matrix",
        "",
        "Made by `python -m specgraph_conformance.matrix` from the reports in this folder. Cases with attention "
        "run once with each: the core's two, and those of the device's own.",
        "",
        f"| | {' | '.join(report['platform'] for report in reports)} |",
        "|---|" + "---|" * len(reports),
        f"| device | {' | '.join(report['device'] for report in reports)} |",
        f"| kind of device | {' | '.join(report.get('device_kind', 'not in this report') for report in reports)} |",
        f"| torch | {' | '.join(report['versions'].get('torch', '') for report in reports)} |",
    ]
    lines.append(f"| cases | {' | '.join(str(len(r['cases'])) for r in reports)} |")
    lines += [f"| {o} | {' | '.join(str(report['counts'][o]) for report in reports)} |" for o in OUTCOMES]
    for group in GROUPS:
        cells = [Counter(c["outcome"] for c in report["cases"] if c["group"] == group) for report in reports]
        shares = [f"{n['passed']} of {n.total() - n['absent']}" if n.total() > n["absent"] else "absent" for n in cells]
        lines.append(f"| cases: {group} | {' | '.join(shares)} |")
    names = dict.fromkeys(name for report in reports for name in report["capabilities"])
    for name in names:
        levels = [report["capabilities"].get(name, {}).get("level", "") for report in reports]
        lines.append(f"| {name} | {' | '.join(levels)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(support_matrix([json.loads(Path(path).read_text()) for path in sys.argv[1:]]))
