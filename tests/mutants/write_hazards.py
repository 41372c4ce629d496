"""Writes the table of mutants in docs/hazards.md: the bug put back, and the case or test that fails it.

python tests/mutants/write_hazards.py          runs all mutants on `cpu`
python tests/mutants/write_hazards.py --new    runs those that the document does not have, and keeps its other rows
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> int:
    """Judge every mutant and write the table; the number of survivors."""
    sys.path[0] = str(Path(__file__).parents[1])  # in place of this folder, in which `hazards` is another module
    from mutants.all import MUTANTS
    from mutants.hazards import DOCUMENT, HAZARDS, KILLERS, MUTANTS_HEADING, NOT_PUT_BACK
    from mutants.run import judging

    known = KILLERS if "--new" in sys.argv[1:] else {}
    with judging() as judge:
        judged = {name: judge(name) for name in MUTANTS if name not in known}
    table = "| mutant | the bug put back | killed by |\n|---|---|---|\n"
    for hazard in HAZARDS:
        for name, mutant in MUTANTS.items():
            if mutant.hazard == hazard:
                killer = judged[name].killed_by if name in judged else known[name]
                table += f"| {name} | {mutant.bug} | {f'`{killer}`' if killer else '**survives**'} |\n"
        if hazard in NOT_PUT_BACK:
            table += f"| {hazard} | {NOT_PUT_BACK[hazard]} | - |\n"
    before, heading, rest = DOCUMENT.read_text(encoding="utf-8").partition(f"## {MUTANTS_HEADING}\n")
    after = rest[rest.index("\n## ") :]
    DOCUMENT.write_text(f"{before}{heading}\n{table}{after}", encoding="utf-8")
    survivors = [name for name, verdict in judged.items() if not verdict.killed_by]
    print(f"{len(judged)} mutants, survivors: {', '.join(survivors) or 'none'}")
    return len(survivors)


if __name__ == "__main__":
    sys.exit(main())
