"""Draws the mutants to judge: writes a cosmic-ray session that holds a random sample and nothing else.

python tests/mutation/sample.py SESSION.sqlite [CONFIG]          (in the root of a copy of the repository)

A site is one operator, number or decorator in the code, independent of what replaces it. Each file gives sites in
proportion to how many it has, at least two, and each site one random replacement. Annotations are left out: nothing
runs them.
"""

from __future__ import annotations

import ast
import random
import sys
from collections import defaultdict
from pathlib import Path

from cosmic_ray.commands import init
from cosmic_ray.config import ConfigDict, load_config
from cosmic_ray.modules import find_modules
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec, WorkItem

CONFIG = Path("tests/mutation/cosmic-ray.toml")
Span = tuple[tuple[int, int], tuple[int, int]]


def settings(config: Path = CONFIG) -> dict:
    """The table `[sample]`."""
    import tomllib

    return tomllib.loads(config.read_text())["sample"]


def annotations(path: Path) -> list[Span]:
    """The annotations of a module: (line from 1, column) of begin and end."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        parts = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript):
            parts.append(node.value)  # an alias of types
        found += [((p.lineno, p.col_offset), (p.end_lineno, p.end_col_offset)) for p in parts if p is not None]
    return found


def sites(items: list[WorkItem]) -> dict[Path, list[list[WorkItem]]]:
    """By file: the mutants of each site."""
    skipped: dict[Path, list[Span]] = {}
    grouped: dict[tuple, list[WorkItem]] = defaultdict(list)
    for item in items:
        (mutation,) = item.mutations
        spans = skipped.setdefault(mutation.module_path, annotations(mutation.module_path))
        if not any(begin <= mutation.start_pos < end for begin, end in spans):
            grouped[mutation.module_path, mutation.start_pos, _family(mutation)].append(item)
    by_file: dict[Path, list[list[WorkItem]]] = defaultdict(list)
    for key in sorted(grouped):
        by_file[key[0]].append(sorted(grouped[key], key=_order))
    return by_file


def _order(item: WorkItem) -> tuple[str, int]:
    (mutation,) = item.mutations
    return mutation.operator_name, mutation.occurrence


def _family(mutation: MutationSpec) -> str:
    return mutation.operator_name.split("_")[0]


def draw(items: list[WorkItem], count: int, seed: int) -> list[WorkItem]:
    """About `count` mutants, the same for the same code and seed."""
    by_file, chosen = sites(items), []
    every = sum(map(len, by_file.values()))
    generator = random.Random(seed)
    for path in sorted(by_file):
        share = min(len(by_file[path]), max(2, round(count * len(by_file[path]) / every)))
        chosen += [generator.choice(site) for site in generator.sample(by_file[path], share)]
    python = [item for item in chosen if _is_python(item.mutations[0])]
    print(
        f"{len(items)} mutants at {every} sites in {len(by_file)} files; {len(chosen)} drawn with seed {seed}, ", end=""
    )
    print(f"{len(chosen) - len(python)} of them no Python and left out")
    return python


def _is_python(mutation: MutationSpec) -> bool:
    """cosmic-ray also takes the `*` in a signature for a product."""
    operator = get_operator(mutation.operator_name)(**mutation.operator_args)
    try:
        compile(mutate_code(mutation.module_path.read_text(), operator, mutation.occurrence), "mutant", "exec")
    except SyntaxError:
        return False
    return True


def _is_excluded(module: Path, config: ConfigDict) -> bool:
    return any(module.match(pattern) for pattern in config["excluded-modules"])


def main(session: str, path: str = str(CONFIG)) -> None:
    """Write the session."""
    config: ConfigDict = load_config(path)
    sample = settings(Path(path))
    modules = [m for m in find_modules([Path(p) for p in config["module-path"]]) if not _is_excluded(m, config)]
    with use_db(session, WorkDB.Mode.create) as db:
        init(modules, db, config.operators_config)
        chosen = draw(list(db.work_items), sample["mutants"], sample["seed"])
        db.clear()
        db.add_work_items(chosen)


if __name__ == "__main__":
    main(*sys.argv[1:])
