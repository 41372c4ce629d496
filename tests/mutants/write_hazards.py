"""Writes docs/hazards.md: each failure of the field, the bug put back, and the case that fails it.

python tests/mutants/write_hazards.py          runs all mutants on `cpu`, ten minutes or more
python tests/mutants/write_hazards.py --new    runs those that the document does not have, and keeps its other rows
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HEAD = """# Hazards: how graph-captured drafters went wrong, and what catches each

Each row happened in a public project, or is a bug that a reviewer put into this repository and that an earlier version
of the suite did not fail ("review of the suite"), or one drawn at random that it did not fail ("sampled mutant"), or is
what a new part can get wrong ("no report found"). For each one that a single machine can show, the repository keeps at
least one *mutant*: the bug, as small as possible, put into a platform, attention, a kernel or the engine
(`tests/mutants/`). The suite runs against all of them, and each must be failed by a case that names its hazard. Made by
`tests/mutants/write_hazards.py`.

## Mutants and the cases that kill them

| mutant | broken part | the bug put back | killed by |
|---|---|---|---|
"""
FIELD = """
## Where they were seen

| id | seen in | symptom | cause |
|---|---|---|---|
"""


def main() -> int:
    """Judge every mutant and write the document; the number of survivors."""
    sys.path[:0] = [str(ROOT / "tests")]
    from mutants.all import MUTANTS
    from mutants.hazards import HAZARDS, NOT_PUT_BACK
    from mutants.run import judge_all

    path, known = ROOT / "docs" / "hazards.md", dict[str, str]()
    if "--new" in sys.argv[1:]:
        rows = [line.strip("| ").split(" | ") for line in path.read_text(encoding="utf-8").splitlines()]
        known = {row[0]: row[3] for row in rows if len(row) == 4 and row[3].startswith("`")}
    judged = judge_all([name for name in MUTANTS if name not in known])
    killers = {name: future.result().killed_by for name, future in judged.items()}
    killers = {name: f"`{killer}`" if killer else "**survives**" for name, killer in killers.items()} | known
    text = HEAD
    for hazard in HAZARDS:
        for name, mutant in MUTANTS.items():
            if mutant.hazard == hazard:
                text += f"| {name} | {mutant.part} | {mutant.bug} | {killers[name]} |\n"
        if hazard in NOT_PUT_BACK:
            text += f"| {hazard} | - | not put back: {NOT_PUT_BACK[hazard]} | - |\n"
    text += FIELD + "".join(f"| {name} | {h.seen} | {h.symptom} | {h.cause} |\n" for name, h in HAZARDS.items())
    path.write_text(text, encoding="utf-8")
    survivors = [name for name in judged if not killers[name].startswith("`")]
    print(f"{len(judged)} mutants, survivors: {', '.join(survivors) or 'none'}")
    return len(survivors)


if __name__ == "__main__":
    sys.exit(main())
