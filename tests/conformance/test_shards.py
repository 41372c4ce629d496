"""Shards of a run and their merged report, against a run in one piece and against edited reports."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import command
import pytest
from conformance.reports import complete_report, source
from conformance.third_party import install, specgraph
from specgraph_conformance.merge import merge, shard_problems
from specgraph_conformance.render import as_json, write_report
from specgraph_conformance.report import Report, digest_of, from_json
from specgraph_conformance.scoreboard import scoreboard
from specgraph_conformance.shards import as_ranges, from_ranges, parse_shard, split, take
from specgraph_conformance.standard import SUITE_VERSION, expected_ids, listed_cases
from specgraph_conformance.verify import problems_of, read_report

from specgraph.errors import ConfigError

Data = dict[str, Any]
Edit = Callable[[Data], object]
LISTED = listed_cases(SUITE_VERSION) or {}
IDS = list(expected_ids(LISTED, ()))


def shard_report(whole: Report, index: int, count: int, **options: Any) -> Report:
    """What a run of one shard reports where a run in one piece reports `whole`."""
    shard = take([result.id for result in whole.cases], index, count, whole.subject.suite, options)
    cases = [whole.cases[place] for place in from_ranges(shard.places)]
    return Report(whole.subject, cases, (), [shard])


def written(folder: Path, reports: list[Report]) -> list[Path]:
    paths = [folder / f"{number}.json" for number, _ in enumerate(reports, 1)]
    for path, report in zip(paths, reports, strict=True):
        write_report(report, path)
    return paths


def edited(path: Path, edit: Edit) -> None:
    """As one who edits a report and knows how the digest is made."""
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps({**data, "digest": digest_of(data)}))


def verified(path: Path) -> list[str]:
    report, data = read_report(path)
    return problems_of(report, data) + shard_problems(report)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_each_case_is_in_one_shard_and_shards_are_as_large(count: int) -> None:
    shards = [take(IDS, index, count, SUITE_VERSION, {}) for index in range(1, count + 1)]
    places = [place for shard in shards for place in from_ranges(shard.places)]
    assert sorted(places) == list(range(len(IDS)))
    assert {shard.total for shard in shards} == {len(IDS)}
    sizes = [shard.selected for shard in shards]
    assert max(sizes) - min(sizes) <= 20, sizes
    kernels = [sum(IDS[place].startswith("kernels.") for place in from_ranges(s.places)) for s in shards]
    assert max(kernels) - min(kernels) <= 8, kernels


def test_what_belongs_together_is_in_one_shard() -> None:
    where = split(LISTED, 3)
    assert set(where) == set(LISTED)  # by the name of the case, so with all parameter sets
    assert len({shard for id, shard in where.items() if id.startswith("collectives.")}) == 1
    assert len({shard for id, shard in where.items() if id.startswith("decoding.")}) == 3


def test_the_split_is_that_of_the_list_not_of_the_selection() -> None:
    def shard_of_each(ids: list[str]) -> dict[str, int]:
        taken = {index: from_ranges(take(ids, index, 3, SUITE_VERSION, {}).places) for index in (1, 2, 3)}
        return {ids[place]: index for index, places in taken.items() for place in places}

    some = [id for id in IDS if "decoding" in id or "fp32" in id]
    assert shard_of_each(some).items() <= shard_of_each(IDS).items()
    news = shard_of_each(["kernels.not-listed[a]", "kernels.not-listed[b]"])
    assert len({*news.values()}) == 1


def test_places_are_kept_as_ranges() -> None:
    assert as_ranges([0, 1, 2, 5, 7, 8]) == "0-2 5 7-8"
    assert as_ranges([]) == ""
    assert from_ranges("0-2 5 7-8") == [0, 1, 2, 5, 7, 8]
    assert from_ranges("") == []


@pytest.mark.parametrize("text", ["", "2", "0/3", "4/3", "-1/3", "1/0", "1/2/3", "a/b", "1.5/2"])
def test_a_bad_shard_is_one_error(text: str) -> None:
    with pytest.raises(ConfigError, match="must be I/N"):
        parse_shard(text)


def test_three_shards_make_the_report_of_one_run(tmp_path: Path) -> None:
    folder = install(tmp_path / "site", extra="Platform.event = lambda self, **options: 1 / 0\n")
    words = ["conformance", "acme", "--group", "discovery", "--group", "streams", "--seed", "3"]
    assert specgraph(folder, *words, "--json", str(tmp_path / "whole.json")).returncode == 1
    whole = json.loads((tmp_path / "whole.json").read_text())
    paths = [tmp_path / f"{index}.json" for index in (1, 2, 3)]
    for index, path in enumerate(paths, 1):
        done = specgraph(folder, *words, "--shard", f"{index}/3", "--json", str(path))
        assert f"made of: 1 shard: {index}/3 (" in done.stdout
    files = [tmp_path / f"merged.{suffix}" for suffix in ("json", "md", "svg")]
    options = ["--json", files[0], "--markdown", files[1], "--badge", files[2]]
    done = command.specgraph("conformance", "merge", paths[2], paths[0], paths[1], *options)
    merged = json.loads(files[0].read_text())
    assert min(sum(case.pop("seconds") for case in report["cases"]) for report in (merged, whole)) > 0
    assert done.returncode == 1  # cases failed, as in the run in one piece
    assert [shard["index"] for shard in merged.pop("shards")] == [1, 2, 3]
    assert merged.pop("digest") != whole.pop("digest")
    assert merged == whole
    assert "made of: 3 shards: 1/3 (" in done.stdout
    assert "| made of | 3 shards: 1/3 (" in files[1].read_text()
    assert files[2].read_text().startswith("<svg")
    assert shard_problems(from_json(json.loads(files[0].read_text()))) == []


def test_a_merged_report_of_the_whole_suite_is_verified(tmp_path: Path) -> None:
    whole = complete_report(absent=("task_update",), own_attention=("mine",))
    reports = [shard_report(whole, index, 3, timeout=9.0) for index in (1, 2, 3)]
    environment = {**whole.subject.environment, "date": "2026-11-23"}
    reports[1] = replace(reports[1], subject=replace(whole.subject, environment=environment))
    merged = merge(written(tmp_path, reports))
    assert Counter(merged.cases) == Counter(whole.cases)
    assert [result.id for result in merged.cases] == [result.id for result in whole.cases]
    assert merged.subject == replace(
        whole.subject, environment={**environment, "date": "2026-11-22, 2026-11-23"}, attention=["mine"]
    )
    path = tmp_path / "merged.json"
    write_report(merged, path)
    assert verified(path) == []
    assert command.specgraph("conformance", "verify", path, "--profile", "drafting").returncode == 0
    assert "| verified | yes |" in scoreboard([path])
    (tmp_path / "whole.json").write_text(as_json(whole))
    assert scoreboard([path]) == scoreboard([tmp_path / "whole.json"])


def test_an_empty_shard_is_not_missing(tmp_path: Path) -> None:
    whole = complete_report()
    one = replace(whole, cases=[r for r in whole.cases if r.id == "discovery.api-number"])
    (home,) = [i for i in (1, 2) if take(["discovery.api-number"], i, 2, SUITE_VERSION, {}).selected]
    assert len(merge(written(tmp_path, [shard_report(one, home, 2)])).cases) == 1
    folder = install(tmp_path / "site")
    words = ["conformance", "acme", "--case", "discovery.api-number", "--shard", f"{3 - home}/2"]
    assert f"none of the 1 that were asked for is in {3 - home}/2" in specgraph(folder, *words).stderr
    assert "must be I/N" in specgraph(folder, "conformance", "acme", "--shard", "3/2").stderr


def test_an_interrupted_shard_makes_the_merged_report_one_of_an_interrupted_run(tmp_path: Path) -> None:
    reports = [shard_report(complete_report(), index, 3) for index in (1, 2, 3)]
    (shard,), cases = reports[1].shards, reports[1].cases[:7]
    places = as_ranges(from_ranges(shard.places)[:7])
    said = f"interrupted: 7 of {shard.selected} selected cases ran"
    reports[1] = Report(reports[1].subject, cases, [said], [replace(shard, places=places)])
    paths = written(tmp_path, reports)
    done = command.specgraph("conformance", "merge", *paths, "--json", tmp_path / "merged.json")
    assert done.returncode == 1
    assert f"shard 2 of 3: {said}" in done.stdout
    problems = verified(tmp_path / "merged.json")
    assert f"shard 2 of 3: {said}" in problems
    assert sum("is not in it" in problem for problem in problems) == 5
    assert not any("its own report" in problem for problem in problems)


def change(name: str, value: object) -> Edit:
    """An edit of one field, `inner.name` for a field of a dict."""

    def edit(data: Data) -> None:
        at = data
        *outer, last = name.split(".")
        for each in outer:
            at = at[each]
        at[last] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (change("suite", "1.3"), f"suite is 1.3, and {SUITE_VERSION} in "),
        (change("platform", "other"), "platform is other, and acme in "),
        (change("device", "b"), "device is b, and a device in "),
        (change("device_kind", "x"), "device_kind is x, and GPU in "),
        (change("device_count", 2), "device_count is 2, and 1 in "),
        (change("seed", 1), "seed is 1, and 0 in "),
        (change("attention", ["fia"]), "attention is ['fia'], and [] in "),
        (change("versions.driver", "580"), "versions: driver is 580, and not there in "),
        (change("versions.torch", "2.12.0"), "versions: torch is 2.12.0, and 2.13.0 in "),
        (change("environment.python", "3.12.0"), "environment: python is 3.12.0, and 3.11.7 in "),
        (change("capabilities.float8", {"level": "no", "reason": "r"}), "capabilities: float8 is {'level': 'no'"),
        (change("sources", [source("specgraph-core", commit="f" * 40)]), "specgraph-core: commit is ffff"),
        (lambda d: d["shards"][0]["options"].update(k="graph"), "option k is graph, and not there in "),
        (lambda d: d["shards"][0].update(total=99), "number of selected cases is 99, and "),
        (lambda d: d["shards"][0].update(count=4), "number of shards is 4, and 3 in "),
        (lambda d: d.pop("shards"), "not the report of one shard, made with --shard I/N, but of a run in one piece"),
        (lambda d: d["shards"][0].update(index=1), "shard 1 of 3, and so is "),
        (lambda d: d["shards"][0].update(digest="0"), "but merged already"),
        (lambda d: d["shards"][0].update(count="3"), "of a shard must be whole numbers"),
        (lambda d: d["shards"][0].pop("count"), "missing 1 required positional argument: 'count'"),
        (lambda d: d["shards"][0].update(places="0"), "its shard has 1 places and "),
        (lambda d: d["shards"][0].update(places="a-b"), "its shard has no places but 'a-b'"),
        (lambda d: d["cases"].append(json.loads(as_json(complete_report()))["cases"][0]), "its shard has "),
    ],
)
def test_shards_that_differ_are_one_error(edit: Edit, said: str, tmp_path: Path) -> None:
    paths = written(tmp_path, [shard_report(complete_report(), index, 3) for index in (1, 2, 3)])
    edited(paths[1], edit)
    done = command.specgraph("conformance", "merge", *paths)
    assert done.returncode == 1
    assert done.stderr.startswith(f"specgraph: {paths[1]}: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_missing_shards_and_other_cases_are_one_error(tmp_path: Path) -> None:
    reports = [shard_report(complete_report(), index, 3) for index in (1, 2, 3)]
    paths = written(tmp_path, reports)

    def error(*given: Path) -> str:
        return command.specgraph("conformance", "merge", *given).stderr

    assert "shards 1 3 of 3 are missing: those that are there had" in error(paths[1])
    assert "name the reports to merge" in error()
    assert "No such file" in error(tmp_path / "none.json")
    write_report(replace(reports[1], cases=reports[2].cases, shards=[replace(reports[2].shards[0], index=2)]), paths[1])
    assert "belongs to another shard" in error(*paths)
    paths[2].write_text(paths[2].read_text().replace('"a device"', '"a better device"'))
    assert "its digest is not that of its content" in error(*paths)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda d: d["cases"][5].update(property="Another."), "of 3 are not those of its own report"),
        (lambda d: d["shards"][0].update(date="2020-01-01"), "results of shard 1 of 3 are not those of its own report"),
        (lambda d: d["shards"].pop(), "its shards 1/3, 2/3 had "),
        (lambda d: d["shards"][1].update(index=1), "its shards are 1/3, 1/3, 3/3: not each once"),
        (lambda d: d["shards"][1].update(count=2), "its shards are 1/3, 2/2, 3/3: not each once"),
        (lambda d: d["shards"][1].update(places="0-3"), "its shards do not say which of its cases are theirs"),
        (lambda d: d["shards"][1].update(places="x"), "its shards do not say which of its cases are theirs"),
    ],
)
def test_verify_checks_the_shards_of_a_merged_report(edit: Edit, said: str, tmp_path: Path) -> None:
    path = tmp_path / "merged.json"
    reports = [shard_report(complete_report(), index, 3) for index in (1, 2, 3)]
    write_report(merge(written(tmp_path, reports)), path)
    assert verified(path) == []
    edited(path, edit)
    assert any(said in problem for problem in verified(path)), verified(path)


def test_verify_names_a_shard_alone(tmp_path: Path) -> None:
    (path,) = written(tmp_path, [shard_report(complete_report(), 2, 3)])
    assert any("it is shard 2 of 3 only" in problem for problem in verified(path))
