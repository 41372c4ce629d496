"""Result files of benchmarks: each says how it was made, and a page refers to it."""

from __future__ import annotations

import json
import re
import subprocess
from typing import Any

import pytest
from test_readme import PAGES, ROOT

FILES = sorted((ROOT / "benchmarks/results").glob("*.json"))
NAMED = {name for page in PAGES for name in re.findall(r"[\w.-]+\.json", page.read_text())}


def committed(name: str) -> bool:
    """Return whether the repository's history, where it is here whole, has a file: COMMIT:PATH."""
    shallow = subprocess.run(["git", "rev-parse", "--is-shallow-repository"], cwd=ROOT, capture_output=True, text=True)
    found = subprocess.run(["git", "cat-file", "-e", name], cwd=ROOT, capture_output=True)
    return found.returncode == 0 or shallow.stdout != "false\n"


def unclear(result: dict[str, Any]) -> str:
    """Return why a reader can't tell how a result was made; empty when it says so."""
    if not result.keys() & {"versions", "environment"}:
        return "no versions"
    lines = result.get("commands", [result.get("command", "")])
    for line in lines:
        if line.startswith("vLLM: "):  # the engine that a result is compared with
            continue
        if not re.match(r"(\w+=\S* )*(specgraph|torchrun|python) ", line):
            return f"no command: {line!r}"
        for script in re.findall(r"(?:python|torchrun .*?) (\S+\.py)", line):
            if not ((ROOT / script).exists() or committed(f"{result.get('scripts_at')}:{script}")):
                return f"no script {script}"
        if found := re.search(r"(?<!\w)(/\w+/\S+|OUT)(?!\w)", line):
            return f"a path of one machine: {found[0]}"
    return "" if lines else "no command"


def test_results_say_how_they_were_made() -> None:
    assert {path.name: why for path in FILES if (why := unclear(json.loads(path.read_text())))} == {}


def test_a_page_refers_to_each_result() -> None:
    assert {path.name for path in FILES} <= NAMED


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("a sweep of kernels", "no command: "),
        ("", "no command: "),
        ("python benchmarks/gone.py --json FILE", "no script benchmarks/gone.py"),
        ("torchrun --nproc-per-node 2 benchmarks/gone.py", "no script benchmarks/gone.py"),
        ("specgraph bench --json /root/out/times.json", "a path of one machine: /root/out/times.json"),
    ],
)
def test_a_result_that_does_not_say_is_seen(command: str, why: str) -> None:
    assert unclear({"versions": {}, "command": command}).startswith(why)
    assert unclear({"command": "specgraph bench"}) == "no versions"
