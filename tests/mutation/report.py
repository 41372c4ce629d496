"""Shows how a session ended: mutants, killed, survived, and each survivor as a diff.

python tests/mutation/report.py SESSION.sqlite
"""

from __future__ import annotations

import sys
from collections import Counter

from cosmic_ray.work_db import WorkDB, use_db


def main(session: str) -> None:
    """Print it."""
    with use_db(session, WorkDB.Mode.open) as db:
        items = {item.job_id: item.mutations[0] for item in db.work_items}
        results = dict(db.results)
    alive = [job for job, result in results.items() if not result.is_killed]
    survivors = sorted((items[job].module_path, items[job].start_pos, job) for job in alive)
    for path, start, job in survivors:
        print(f"\n{path}:{start[0]} {items[job].operator_name}")
        lines = (results[job].diff or "").splitlines()
        print("\n".join(line for line in lines if line[:1] in ("+", "-") and line[:3] not in ("---", "+++")))
    slow = sum((result.output or "").startswith("too slow") for result in results.values())
    killed = len(results) - len(survivors)
    print(
        f"\n{len(items)} mutants, {len(results)} judged: {killed} killed ({slow} too slow), {len(survivors)} survived"
    )
    print(f"score {killed / max(len(results), 1):.1%}")
    by_file = Counter(str(items[job].module_path) for job in results)
    left = Counter(str(path) for path, _, _ in survivors)
    for path, count in sorted(by_file.items()):
        print(f"  {path}: {count - left[path]} of {count} killed")


if __name__ == "__main__":
    main(sys.argv[1])
