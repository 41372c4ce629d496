"""Prints the parts that an environment can have, and says on stderr which are left out and why; `make` asks it.

    python tests/fitting_parts.py --torch torch==2.13.0 FOLDER...
    python tests/fitting_parts.py --python 3.13.0 --wheels build/packages FOLDER...

Python and torch are those that run this, unless they are given. It fails in one line where the torch that is installed
is not the one that was asked for.
"""

from __future__ import annotations

import argparse
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]


def not_as_asked(asked: str, torch: str) -> str | None:
    """Return the line for a torch that does not meet `asked`; None for one that does, and where that is a file."""
    try:
        wanted = Requirement(asked).specifier
    except InvalidRequirement:
        return None
    if wanted.contains(torch, prereleases=True):
        return None
    return f"TORCH={asked} was asked for, and torch {torch} is in {sys.prefix}: give another VENV, or `make clean`"


def lacks(project: dict[str, Any], python: str, torch: str | None, out: list[str]) -> str | None:
    """Return the reason why a part can't be there, after those that are out; None where it can."""
    if python not in SpecifierSet(wanted := project.get("requires-python", "")):
        return f"it requires Python {wanted}, this is {python}"
    for required in map(Requirement, project.get("dependencies", ())):
        if required.name == "torch" and torch and not required.specifier.contains(torch, prereleases=True):
            return f"it requires torch {required.specifier}, this is {torch}"
        if required.name in out:
            return f"it requires {required.name}"
    return None


def fitting(projects: dict[str, dict[str, Any]], python: str, torch: str | None) -> tuple[list[str], dict[str, str]]:
    """Return the folders that fit, in the order given, and the reason of each other by its distribution's name."""
    reasons: dict[str, str] = {}
    while found := {
        project["name"]: reason
        for project in projects.values()
        if project["name"] not in reasons and (reason := lacks(project, python, torch, list(reasons))) is not None
    }:
        reasons |= found
    return [folder for folder, project in projects.items() if project["name"] not in reasons], reasons


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("folders", nargs="*", metavar="FOLDER")
    options.add_argument("--torch", metavar="REQUIREMENT", help="the torch that was asked for")
    options.add_argument("--python", metavar="VERSION", default=platform.python_version())
    options.add_argument("--wheels", metavar="FOLDER", type=Path, help="print the wheels of this folder, for any torch")
    given = options.parse_args()
    torch = None if given.wheels else version("torch")
    if torch and given.torch and (wrong := not_as_asked(given.torch, torch)) is not None:
        sys.exit(wrong)
    projects = {f: tomllib.loads((ROOT / f / "pyproject.toml").read_text())["project"] for f in given.folders}
    folders, reasons = fitting(projects, given.python, torch)
    for name, reason in reasons.items():
        print(f"{name} is left out: {reason}", file=sys.stderr)
    for folder in folders:
        name = projects[folder]["name"].replace("-", "_")
        print(*(given.wheels.glob(f"{name}-*.whl") if given.wheels else [folder]))


if __name__ == "__main__":
    main()
