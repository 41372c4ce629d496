"""`specgraph conformance verify`: a good report is verified, and each way of making it look better is found."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import command
import pytest
import yaml
from specgraph_conformance.render import as_json
from specgraph_conformance.report import digest_of, from_json
from specgraph_conformance.scoreboard import scoreboard
from specgraph_conformance.sources import blob_hash, digest_at, source_of
from specgraph_conformance.sources import digest_of as sources_digest
from specgraph_conformance.standard import SUITE_VERSION
from specgraph_conformance.verify import problems_of, read_report

from conformance.reports import complete_report, source
from specgraph.errors import ConfigError

ROOT = Path(__file__).parents[2]
Data = dict[str, Any]


def good(**options: Any) -> Data:
    return json.loads(as_json(complete_report(**options)))


def verified(data: Data) -> list[str]:
    return problems_of(from_json(data), data)


def with_digest(data: Data) -> Data:
    """Edit a report as one who knows how the digest is made."""
    return {**data, "digest": digest_of(data)}


def passed(data: Data, id: str) -> list[str]:
    """The passed cases of the group of a case."""
    return data["passed"][id.partition(".")[0]]


def counted(data: Data) -> None:
    outcomes = [each["outcome"] for each in data["cases"]]
    data["counts"] = {name: outcomes.count(name) for name in data["counts"]}
    data["counts"]["passed"] = sum(map(len, data["passed"].values()))


@pytest.mark.parametrize("absent", [(), ("task_update", "collectives_in_graph"), ("merged_loop", "external_events")])
def test_a_good_report_has_no_problems(absent: tuple[str, ...]) -> None:
    assert verified(good(absent=absent)) == []


def outcome(data: Data, id: str, outcome: str, reason: str = "") -> None:
    passed(data, id).remove(id)
    data["cases"].append({"id": id, "outcome": outcome, "reason": reason})


def added(data: Data, id: str) -> None:
    passed(data, id).append(id)


def absent_attention_of_the_core(data: Data) -> None:
    id = next(each for each in data["passed"]["drafting"] if "[paged-merged" in each)
    outcome(data, id, "absent", "attention 'paged' is slow")


def two_devices_hidden(data: Data) -> None:
    data["device_count"] = 2
    reason = "collectives between ranks need two devices, and there is 1"
    outcome(data, "collectives.chain-between-devices", "absent", reason)


CORE = source("specgraph-core", changed=["specgraph/capture/graph_runner.py"])
BACKEND = source("specgraph-acme", state="wheel", changed=["specgraph_acme/graph.py"])
NO_STATE = source("specgraph-conformance", state="unknown", commit="")
TAMPERED: dict[str, tuple[Callable[[Data], Any], str]] = {
    "failed": (lambda data: outcome(data, "capture.runs-nothing", "failed"), "failed: capture.runs-nothing"),
    "left out": (
        lambda data: passed(data, "decoding.a").remove("decoding.sampled-repeats"),
        f"case decoding.sampled-repeats of suite {SUITE_VERSION} is not in it",
    ),
    "twice": (lambda data: added(data, "capture.runs-nothing"), "case capture.runs-nothing is in it twice"),
    "invented": (
        lambda data: added(data, "capture.mine"),
        "there is no case capture.mine in suite",
    ),
    "absent": (
        lambda data: outcome(data, "replay.on-a-side-stream", "absent", "not supported here"),
        "case replay.on-a-side-stream is absent, and no capability of the report says so",
    ),
    "absent attention": (
        absent_attention_of_the_core,
        "is absent, and no capability of the report says so: attention 'paged' is slow",
    ),
    "devices": (two_devices_hidden, "case collectives.chain-between-devices is absent"),
    "core patched": (
        lambda data: data["sources"].__setitem__(0, CORE),
        "specgraph-core ran with 1 changed files that its commit has not: specgraph/capture/graph_runner.py",
    ),
    "backend patched": (
        lambda data: data["sources"].__setitem__(2, BACKEND),
        "specgraph-acme ran with 1 changed files that its wheel has not",
    ),
    "no state": (
        lambda data: data["sources"].__setitem__(1, NO_STATE),
        "specgraph-conformance ran from neither a git repository nor a wheel",
    ),
    "no suite": (lambda data: data["sources"].pop(1), "it does not say which specgraph-conformance ran"),
    "no machine": (lambda data: data["environment"].update(machine=""), "its environment does not say machine"),
    "no torch": (lambda data: data.update(versions={}), "its versions do not say torch"),
    "other suite": (lambda data: data.update(suite="7.3"), "it is of suite 7.3, and this is"),
    "problem": (lambda data: data.update(problems=["xfails.toml declares 'a.b'"]), "xfails.toml declares 'a.b'"),
}


@pytest.mark.parametrize(("tamper", "said"), TAMPERED.values(), ids=TAMPERED)
def test_a_tampered_report_is_not_verified(tamper: Callable[[Data], Any], said: str) -> None:
    data = good()
    tamper(data)
    counted(data)
    edited, found = verified(data), verified(with_digest(data))
    assert "its digest is not that of its content" in edited[0]
    assert any(said in problem for problem in edited)
    assert any(said in problem for problem in found)
    assert not any("digest" in problem for problem in found)


def test_counts_are_those_of_the_cases() -> None:
    data = good()
    data["counts"]["passed"] += 1
    assert any("its counts are" in problem for problem in verified(with_digest(data)))


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        return [leaf for key, each in value.items() for leaf in leaves(each, (*path, key))]
    if isinstance(value, list):
        return [leaf for key, each in enumerate(value) for leaf in leaves(each, (*path, key))]
    return [path]


GOOD = good()


def test_any_edit_is_seen() -> None:
    """Each field of a report of a few cases is edited."""
    absent = good(absent=("task_update",))
    report = with_digest({**absent, "passed": {"device": GOOD["passed"]["device"][:2]}, "cases": absent["cases"][:2]})
    for path, value in itertools.product(leaves(report), ("", "x", -1, None)):
        data = json.loads(json.dumps(report))
        place = data
        for key in path[:-1]:
            place = place[key]
        place[path[-1]], before = value, place[path[-1]]
        assert value == before or digest_of(data) != data["digest"], path


def test_the_command(tmp_path: Path) -> None:
    path, bad = tmp_path / "good.json", tmp_path / "bad.json"
    path.write_text(as_json(complete_report()))
    done = command.specgraph("conformance", "verify", path)
    assert done.returncode == 0, done.stderr
    assert (
        f"{path}: verified: acme conforms to graphs, task-update, drafting and parallel {SUITE_VERSION}" in done.stdout
    )
    assert f"drafting {SUITE_VERSION}: conforms" in done.stdout
    bad.write_text(path.read_text().replace('"failed": 0', '"failed": 1'))
    done = command.specgraph("conformance", "verify", path, bad)
    assert done.returncode == 1
    assert f"{bad}: not verified" in done.stdout
    assert "wrong: its digest is not that of its content" in done.stdout


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[]", "no report of the suite"),
        ("{}", "it has no field 'platform'"),
        (json.dumps({**GOOD, "cases": [{"id": "x"}]}), "no report of the suite"),
        (json.dumps({**GOOD, "cases": [{"id": "a.b", "outcome": "fine"}]}), "has the outcome 'fine'"),
        (json.dumps({**GOOD, "cases": [{"id": "a.b", "outcome": "failed", "more": 1}]}), "no report of the suite"),
        (json.dumps({**GOOD, "capabilities": {"graphs": {"level": "maybe", "reason": ""}}}), "must have a level"),
        (json.dumps({**GOOD, "counts": 3}), "field 'counts' must be a dict"),
        (json.dumps({name: value for name, value in GOOD.items() if name != "suite"}), "it has no field 'suite'"),
    ],
)
def test_what_is_no_report_is_one_error(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(text)
    done = command.specgraph("conformance", "verify", path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"specgraph: {path}: ")
    assert said in done.stderr


def test_a_report_is_short_and_says_what_the_run_said(tmp_path: Path) -> None:
    whole = complete_report(absent=("task_update", "collectives_in_graph"))
    path = tmp_path / "report.json"
    path.write_text(as_json(whole))
    report, data = read_report(path)
    assert problems_of(report, data) == []
    assert {(r.id, r.group, r.outcome, r.reason) for r in report.cases} == {
        (r.id, r.group, r.outcome, r.reason) for r in whole.cases
    }
    assert len(path.read_text().splitlines()) < 40 + whole.counts["absent"]
    assert as_json(report) == path.read_text()


def test_a_profile_can_be_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(as_json(complete_report(absent=("task_update",))))
    assert command.specgraph("conformance", "verify", path, "--profile", "drafting").returncode == 0
    done = command.specgraph("conformance", "verify", path, "--profile", "task-update")
    assert done.returncode == 1
    assert "wrong: it does not conform to task-update" in done.stdout
    assert "there is no profile all" in command.specgraph("conformance", "verify", path, "--profile", "all").stderr


def test_several_reports_are_checked_each_for_itself(tmp_path: Path) -> None:
    paths = [tmp_path / "first.json", tmp_path / "second.json"]
    for path in paths:
        path.write_text(as_json(complete_report(absent=("collectives_in_graph",))))
    done = command.specgraph("conformance", "verify", *paths)
    assert done.returncode == 0, done.stdout
    assert "wrong" not in done.stdout


def test_the_reusable_workflow_runs_commands_that_exist(tmp_path: Path) -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/conformance.yml").read_text())
    assert {"platform", "install", "runs-on", "profile"} == set(workflow[True]["workflow_call"]["inputs"])
    steps = [step["run"] for step in workflow["jobs"]["conformance"]["steps"] if "run" in step]
    assert any(step.startswith('.venv/bin/specgraph conformance "$PLATFORM" --json report.json') for step in steps)
    (verify,) = [step for step in steps if "verify" in step]
    shim = tmp_path / ".venv" / "bin" / "specgraph"
    shim.parent.mkdir(parents=True)
    shim.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > asked\n')
    shim.chmod(0o755)
    (tmp_path / "report.json").write_text(as_json(complete_report(absent=("task_update",))))
    for profile, status in (("", 0), ("task-update", 1)):
        env = {**os.environ, "PROFILE": profile}
        subprocess.run(["bash", "-c", verify], cwd=tmp_path, env=env, check=True)
        done = command.specgraph(*(tmp_path / "asked").read_text().splitlines(), cwd=tmp_path)
        assert done.returncode == status, done.stderr


def test_a_path_is_asked_for(tmp_path: Path) -> None:
    assert "name the reports to verify" in command.specgraph("conformance", "verify").stderr
    assert "No such file" in command.specgraph("conformance", "verify", tmp_path / "none.json").stderr
    assert "one platform at a time" in command.specgraph("conformance", "cpu", "cuda").stderr


def git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_the_state_of_a_package_in_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "inner" / "acme_for_sources"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("A = 1\n")
    monkeypatch.syspath_prepend(tmp_path / "inner")
    assert source_of("acme", "acme_for_sources").state == "unknown"
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    clean = source_of("acme", "acme_for_sources")
    commit = git(tmp_path, "rev-parse", "HEAD").strip()
    assert (clean.state, clean.commit, clean.changed) == ("commit", commit, ())
    assert clean.package == "inner/acme_for_sources"
    assert digest_at(tmp_path, commit, clean.package) == clean.digest
    (package / "more.py").write_text("B = 1\n")
    (package / "notes.txt").write_text("no code")
    patched = source_of("acme", "acme_for_sources")
    assert patched.changed == ("inner/acme_for_sources/more.py",)
    assert patched.digest != clean.digest
    assert digest_at(tmp_path, "0" * 40, clean.package) is None
    (package / "more.py").unlink()
    (package / "__init__.py").write_text("A = 2\n")
    assert source_of("acme", "acme_for_sources").changed == ("inner/acme_for_sources/__init__.py",)


def test_a_report_from_other_code_than_its_commit_is_found(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "__init__.py").write_text("A = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    commit = git(tmp_path, "rev-parse", "HEAD").strip()
    right = sources_digest([("__init__.py", blob_hash(b"A = 1\n"))])
    for digest, problems in ((right, 0), ("0" * 64, 1)):
        report = complete_report(
            sources=[source(name, commit=commit, digest=digest) for name in ("specgraph-core",)]
            + [source("specgraph-conformance")]
        )
        data = json.loads(as_json(report))
        found = problems_of(report, data, checkout=tmp_path)
        assert len(found) == problems
        assert all("was not what commit" in problem for problem in found)


def test_the_scoreboard_says_which_reports_are_verified(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("good.json", "edited.json", "first.json")]
    paths[0].write_text(json.dumps(GOOD))
    paths[1].write_text(json.dumps({**GOOD, "device": "a better one"}))
    paths[2].write_text(as_json(complete_report(suite="1.0")))
    page = scoreboard(paths)
    row = next(line for line in page.splitlines() if line.startswith("| verified |"))
    assert row.startswith("| verified | yes | no: its digest is not")
    assert "| no: it is of suite 1.0" in row
    assert f"| suite | {SUITE_VERSION} | {SUITE_VERSION} | 1.0 |" in page
    assert "| drafting | conforms | conforms | missing: it is of suite 1.0" in page
    (tmp_path / "old.json").write_text(json.dumps({name: value for name, value in GOOD.items() if name != "suite"}))
    with pytest.raises(ConfigError):
        read_report(tmp_path / "old.json")


def test_docs_hold_the_scoreboard_of_the_reports_and_no_report() -> None:
    root = Path(__file__).parents[2]
    (page,) = (root / "docs/conformance").iterdir()
    assert page.read_text() == scoreboard(sorted((root / "conformance/reports").glob("*.json")))
