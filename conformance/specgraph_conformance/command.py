"""The implementation of `specgraph conformance`: check the arguments, run the suite, write the reports."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from specgraph.errors import ConfigError
from specgraph.validation import suggestion
from specgraph_run.cli.interrupts import finished_first

from specgraph_conformance.case import GROUPS, attention_place
from specgraph_conformance.render import (
    as_json,
    as_markdown,
    check_writable,
    print_report,
    profile_lines,
    verdict,
)
from specgraph_conformance.report import Report
from specgraph_conformance.run import Selection, run_suite
from specgraph_conformance.standard import PROFILES, conformance, listed_cases
from specgraph_conformance.verify import problems_of, read_report
from specgraph_conformance.xfails import read_xfails

__all__ = ["Selection", "run_command", "verify_command"]

_HAZARD = re.compile(r'hazard="([\w-]+)"')
"""Finds the hazards in the source of the cases: importing their modules would import torch."""


def run_command(
    platform: str,
    selection: Selection,
    *,
    jobs: int | None = None,
    profile: str | None = None,
    json: str | None = None,
    markdown: Path | None = None,
) -> bool:
    """Run the suite, show the report and write the files.

    Args:
        jobs: as in `run_suite`.
        profile: the profile that the run must conform to, besides being green. None for no profile.
        json: a path, or "-" for standard output. The table then goes to standard error.

    Returns:
        Whether the run is green and conforms to `profile`.

    Raises:
        PlatformError: the platform is unknown or not available, or has no graphs.
        ConfigError: xfails.toml is malformed, a group, case or profile is unknown, or a path can't be written. In all
            these cases nothing ran.
        KeyboardInterrupt: the run was interrupted. If a case ran, files and table say how many did.
    """
    _check_profile(profile)
    unknown = [group for group in selection.groups if group not in GROUPS]
    if unknown:
        raise ConfigError(f"there is no group {', '.join(unknown)}; groups are {', '.join(GROUPS)}")
    for asked in selection.cases:
        if (name := asked.partition("[")[0]) not in (known := listed_cases()):
            raise ConfigError(
                f"there is no case '{asked}'; {suggestion([name], known) or 'none is called much like it'}"
            )
    hazards = {
        name for file in Path(__file__).parent.rglob("*.py") for name in _HAZARD.findall(file.read_text("utf-8"))
    }
    if unknown := [hazard for hazard in selection.hazards if hazard not in hazards]:
        raise ConfigError(f"no case is against {', '.join(unknown)}; hazards are {', '.join(sorted(hazards))}")
    for word in selection.attention:
        attention_place(word)
    if selection.xfails is not None:
        read_xfails(selection.xfails)
    _check_keyword(selection.keyword)
    if selection.timeout is not None and not 0 < selection.timeout < float("inf"):
        raise ConfigError(f"timeout {selection.timeout:g} is not a number of seconds that a case can take")
    if jobs is not None and jobs < 0:
        raise ConfigError(f"jobs {jobs} is not a number of processes that can run cases")
    files = [
        (path, form)
        for path, form in ((None if json == "-" else json, as_json), (markdown, as_markdown))
        if path is not None
    ]
    for path, _ in files:
        check_writable(Path(path))
    report = run_suite(platform, selection, jobs=jobs)
    for path, form in files:  # written first: an error while the table is shown then loses no report
        with finished_first():
            Path(path).write_text(form(report), encoding="utf-8")
    print_report(report, file=sys.stderr if json == "-" else sys.stdout)
    if json == "-":
        print(as_json(report), end="")
    if report.interrupted:
        raise KeyboardInterrupt
    return report.is_green and _conforms(report, profile)


def _check_keyword(expression: str) -> None:
    """Refuse a -k expression that pytest can't parse: words joined by `and`, `or`, `not` and brackets."""
    words = re.sub(r"(?<![^\s()])(?!(?:and|or|not)(?![^\s()]))[^\s()]+", "x", expression)
    try:
        if expression:
            compile(words.strip(), "-k", "eval")
    except SyntaxError:
        raise ConfigError(f"-k '{expression}': join words by and, or, not and brackets") from None


def _check_profile(profile: str | None) -> None:
    names = [known.name for known in PROFILES]
    if profile is not None and profile not in names:
        raise ConfigError(f"there is no profile {profile}; profiles are {', '.join(names)}")


def _conforms(report: Report, profile: str | None) -> bool:
    return profile is None or any(a.conforms for a in conformance(report) if a.profile == profile)


def verify_command(paths: Sequence[Path], *, profile: str | None = None, checkout: Path | None = None) -> bool:
    """Check submitted reports. No case runs and no device is opened.

    Args:
        profile: the profile that each report must conform to, besides being without problems. None for no profile.
        checkout: a clone of the repository, to compare commits with.

    Returns:
        Whether no report has a problem and each conforms to `profile`.

    Raises:
        ConfigError: a file is no report of this suite, or the profile is unknown.
    """
    _check_profile(profile)
    verified = True
    for path in paths:
        report, data = read_report(path)
        problems = problems_of(report, data, checkout)
        if not _conforms(report, profile):
            problems.append(f"it does not conform to {profile}")
        verified = verified and not problems
        print(f"{path}: {'not verified' if problems else 'verified'}: {verdict(report)}")
        for name, answer in profile_lines(report):
            print(f"  {name}: {answer}")
        for problem in problems:
            print(f"  wrong: {problem}")
    return verified
