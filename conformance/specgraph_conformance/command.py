"""The implementation of `specgraph conformance`: check the arguments, run the suite, write the reports."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from specgraph.errors import ConfigError

from specgraph_conformance.case import GROUPS
from specgraph_conformance.render import as_json, check_writable, print_report, profile_lines, verdict, write_report
from specgraph_conformance.run import Selection, run_suite
from specgraph_conformance.session import open_session
from specgraph_conformance.verify import problems_of, read_report

__all__ = ["Selection", "run_command", "verify_command"]


def run_command(
    platform: str,
    selection: Selection,
    *,
    json: str | None = None,
    markdown: Path | None = None,
    badge: Path | None = None,
) -> bool:
    """Run the suite, show the report, write the files.

    Args:
        json: a path, or "-" for standard output; the table then goes to standard error.

    Returns:
        Whether the run is green.

    Raises:
        PlatformError: unknown or unavailable platform, or one without graphs.
        ConfigError: a malformed xfails.toml, an unknown group or case, a path that can't be written. Nothing ran.
    """
    unknown = [group for group in selection.groups if group not in GROUPS]
    if unknown:
        raise ConfigError(f"there is no group {', '.join(unknown)}; groups are {', '.join(GROUPS)}")
    if selection.timeout is not None and selection.timeout <= 0:
        raise ConfigError(f"timeout {selection.timeout:g} is not a number of seconds that a case can take")
    files = {".json": None if json in (None, "-") else Path(str(json)), ".md": markdown, ".svg": badge}
    paths = [(path, suffix) for suffix, path in files.items() if path is not None]
    for path, suffix in paths:
        check_writable(path, suffix)
    open_session(platform, seed=selection.seed, xfails=selection.xfails).platform.close()
    report = run_suite(platform, selection)
    print_report(report, file=sys.stderr if json == "-" else sys.stdout)
    if json == "-":
        print(as_json(report), end="")
    for path, suffix in paths:
        write_report(report, path, suffix)
    return report.is_green


def verify_command(paths: Sequence[Path], checkout: Path | None = None) -> bool:
    """Check reports that others have made; nothing runs and no device is opened.

    Args:
        checkout: a clone of the repository to compare commits with.

    Returns:
        Whether nothing is wrong with any of them.

    Raises:
        ConfigError: a file is no report of this suite.
    """
    verified = True
    for path in paths:
        report, data = read_report(path)
        problems = problems_of(report, data, checkout)
        verified = verified and not problems
        print(f"{path}: {'not verified' if problems else 'verified'}: {verdict(report)}")
        for profile, answer in profile_lines(report):
            print(f"  {profile}: {answer}")
        for problem in problems:
            print(f"  wrong: {problem}")
    return verified
