"""Reads docs/hazards.md: the hazards, which are written there by hand, and the case that killed each mutant last."""

from __future__ import annotations

from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "hazards.md"
MUTANTS_HEADING = "Mutants and the cases that kill them"


def read_table(heading: str) -> dict[str, list[str]]:
    """Return the rows of the table under a heading by their first column."""
    section = DOCUMENT.read_text(encoding="utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return {name: columns for name, *columns in rows[1:]}


HAZARDS = read_table("Where they were seen")
"""The place where each hazard was seen, its symptom and its cause."""
NOT_PUT_BACK = {name: bug for name, (bug, _) in read_table(MUTANTS_HEADING).items() if bug.startswith("not put back: ")}
"""Hazards without a mutant, and why."""
KILLERS = {name: killer.strip("`") for name, (_, killer) in read_table(MUTANTS_HEADING).items()}
"""The case that failed each mutant when the document was written: it is tried first."""


def hazard_of(mutant: str) -> str:
    """Return the hazard that a mutant is named after: its name without the words that tell it from others."""
    return max((name for name in HAZARDS if f"{mutant}-".startswith(f"{name}-")), key=len)
