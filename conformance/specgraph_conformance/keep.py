"""Rewrites reports in the short form in which they are kept in `conformance/reports`.

python -m specgraph_conformance.keep REPORT...
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from specgraph.errors import ConfigError

from specgraph_conformance.render import as_kept_json
from specgraph_conformance.report import digest_of
from specgraph_conformance.verify import read_report


def keep(path: Path) -> None:
    """Rewrite one report. Raises ConfigError if it is none, or was edited: the new digest would hide that."""
    report, data = read_report(path)
    if data["digest"] != digest_of(data):
        raise ConfigError(f"{path}: its digest is not that of its content: run the suite again")
    path.write_text(as_kept_json(report), encoding="utf-8")


def main(paths: Sequence[str]) -> None:
    """Rewrite the reports."""
    for path in paths:
        keep(Path(path))


if __name__ == "__main__":
    main(sys.argv[1:])
