"""`specgraph conformance` on backends of others: reports, exit status, declared gaps, hangs, crashes, bad input."""

from __future__ import annotations

import io
import json
import sys
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
from conformance.third_party import GOOD, install, specgraph
from specgraph_conformance import command
from specgraph_conformance.plugin import CASE
from specgraph_conformance.run import Selection
from specgraph_conformance.standard import SUITE_VERSION
from specgraph_run.cli import main

from specgraph.cpu import stream


def load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def outcomes(report: dict[str, Any]) -> dict[str, str]:
    passed = dict.fromkeys((id for ids in report["passed"].values() for id in ids), "passed")
    return passed | {case["id"]: case["outcome"] for case in report["cases"]}


def test_a_good_backend_gets_its_report(tmp_path: Path) -> None:
    extra = """
    from dataclasses import replace
    from specgraph.device import no
    from specgraph.cpu.platform import CAPABILITIES
    Platform.capabilities = replace(CAPABILITIES, collectives_in_graph=no("collectives are not recorded"))
    """
    folder = install(tmp_path / "site", extra=extra)
    (folder / "tests").mkdir()
    (folder / "tests" / "conftest.py").write_text("raise ImportError('not the suite's')")  # of the folder it runs in
    paths = [tmp_path / f"report.{suffix}" for suffix in ("json", "md")]
    groups = ["--group", "device", "--group", "streams", "--group", "collectives"]
    files = ["--json", str(paths[0]), "--markdown", str(paths[1])]
    done = specgraph(folder, "acme", *groups, *files)
    assert done.returncode == 0, done.stderr
    report = load(paths[0])
    assert set(report) >= {"platform", "device", "versions", "capabilities", "seed", "counts", "cases"}
    assert (report["platform"], report["device"], report["seed"]) == ("acme", "a device", 0)
    assert report["device_kind"] == "a stand-in"
    assert all("a stand-in" in text for text in (done.stdout, paths[1].read_text()))
    assert report["versions"]["acme-backend"] == "1.2"
    assert (report["suite"], report["device_count"]) == (SUITE_VERSION, 1)
    ours = ["specgraph-core", "specgraph-models", "specgraph-run", "specgraph-conformance"]
    assert [s["distribution"] for s in report["sources"]] == [*ours, "acme-backend"]
    assert all(len(source["digest"]) == 64 for source in report["sources"])
    assert report["capabilities"]["collectives_in_graph"]["level"] == "no"
    assert report["counts"]["passed"] >= 25
    assert report["counts"]["failed"] == report["counts"]["xfailed"] == 0
    assert sum(report["counts"].values()) == len(outcomes(report))
    assert [*report["passed"]] == ["device", "streams"]
    for case in report["cases"]:
        assert set(case) == {"id", "outcome", "reason"}
        assert case["outcome"] == "absent"
        if case["id"].startswith("collectives."):
            assert "not recorded" in case["reason"]
    assert "acme passes the cases that were run" in done.stdout
    assert f"graphs {SUITE_VERSION}: missing: " in done.stdout
    count = sum(case["id"].startswith("collectives.") for case in report["cases"])
    said = " ".join(done.stdout.split())  # lines are wrapped
    assert f"not run: {count} cases of collectives, because collectives_in_graph: collectives are not recorded" in said
    assert "# Conformance of `acme`" in paths[1].read_text()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("kind", [Terminal, io.StringIO])
def test_a_terminal_has_a_line_before_the_cases_are_collected(
    kind: type[io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = kind()
    at_first: list[str] = []
    monkeypatch.setattr(command, "run_command", lambda *args, **options: at_first.append(said.getvalue()) or True)
    monkeypatch.setattr(sys, "argv", ["specgraph", "conformance", "cpu"])
    with redirect_stderr(said), pytest.raises(SystemExit):
        main()
    assert at_first == ["specgraph: loading torch and collecting the cases\n" if said.isatty() else ""]


def test_an_expression_takes_ids_as_reports_print_them() -> None:
    class Selected:
        ids: tuple[str, ...] = ()

        def pytest_collection_finish(self, session: pytest.Session) -> None:
            self.ids = tuple(item.stash[CASE].id for item in session.items)

    for expression, wanted in (
        ("capture.exception-passes-through[11]", ("capture.exception-passes-through[11]",)),
        ("capture.exception-passes-through[1", tuple(f"capture.exception-passes-through[{n}]" for n in (1, 11))),
        (
            "streams.use-switches-and-restores or (runs-nothing and not kernels)",
            ("streams.use-switches-and-restores", "capture.runs-nothing"),
        ),
    ):
        selected = Selected()
        pytest.main([*Selection(keyword=expression).arguments("cpu"), "--collect-only"], plugins=[selected])
        assert selected.ids == wanted


def test_a_failure_names_property_hazard_cause_and_how_to_run_it_again(tmp_path: Path) -> None:
    folder = install(tmp_path / "site", extra="Platform.event = lambda self, **options: 1 / 0\n")
    case = "streams.event-is-reusable"
    done = specgraph(folder, "acme", "--case", case, "--json", str(tmp_path / "r.json"))
    assert done.returncode == 1
    (result,) = load(tmp_path / "r.json")["cases"]
    assert result["outcome"] == "failed"
    assert "ZeroDivisionError" in result["reason"]
    for said in (
        f"failed {case}: look at: record() keeps the first point",
        "property: An event recorded a second time marks the later point.",
        "seen:     ZeroDivisionError",
        "hazard:   none",
        f"again:    specgraph conformance acme --case {case}\n",
        f"begin with {case}",
    ):
        assert said in done.stdout


def test_declared_gaps_are_strict(tmp_path: Path) -> None:
    gap = '[[xfail]]\ncase = "{}"\nowner = "vendor"\nreason = "known"\nlink = ""\n'
    declared = ("streams.event-is-reusable", "streams.use-switches-and-restores", "kernels.linears", "no.such")
    gaps = "".join(gap.format(case) for case in declared)
    extra = "Platform.event = lambda self, **options: 1 / 0\n"
    folder = install(tmp_path / "site", extra=extra, xfails=gaps)
    cases = ["--case", "streams.event-is-reusable", "--case", "streams.use-switches-and-restores"]
    done = specgraph(folder, "acme", *cases, "--json", str(tmp_path / "r.json"))
    report = load(tmp_path / "r.json")
    assert outcomes(report) == {"streams.event-is-reusable": "xfailed", "streams.use-switches-and-restores": "failed"}
    assert done.returncode == 1  # a declared case passed, and an entry matches nothing
    (problem,) = report["problems"]  # not of kernels.linears, which is in none of the files of these cases
    assert "no.such" in problem
    (folder / "acme_backend" / "xfails.toml").write_text(gap.format("streams.event-is-reusable"))
    assert specgraph(folder, "acme", *cases).returncode == 0


def test_a_hang_a_crash_and_an_unusable_device_cost_their_cases_only(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = install(
        tmp_path / "site",
        extra="""
    import os, time
    from contextlib import contextmanager
    STUCK = []

    class Graph(CpuGraph):
        @contextmanager
        def capture(self, *args, **options):
            try:
                with CpuGraph.capture(self, *args, **options):
                    yield
            except BaseException:
                STUCK.append(1)
                raise

    Platform.memory = lambda self: time.sleep(600)
    Platform.event = lambda self, *, timing=False, external=False: os._exit(11) if timing else CpuPlatform.event(self)
    Platform.graph_type = Graph
    Platform.is_capturing = lambda self: bool(STUCK) or CpuPlatform.is_capturing(self)
    """,
    )
    asked = {
        "device.memory-figures-agree": "failed",
        "streams.events-time": "failed",
        "streams.current-is-per-thread": "passed",
        "capture.exception-passes-through[0]": "failed",
        "capture.scalars-are-baked": "passed",
    }
    options = [word for case in asked for word in ("--case", case)]
    done = specgraph(folder, "acme", *options, "--timeout", "5", "--json", str(tmp_path / "r.json"), jobs=1)
    assert "plugin.py" in capfd.readouterr().err  # the stack of the hang
    report = load(tmp_path / "r.json")
    assert done.returncode == 1
    assert outcomes(report) == asked
    reasons = {case["id"]: case["reason"] for case in report["cases"]}
    assert "did not finish within 5 s" in reasons["device.memory-figures-agree"]
    assert "the process died" in reasons["streams.events-time"]


def test_a_device_whose_captures_have_one_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "CpuEvent", stream.CpuEvent)  # the backend replaces it, in this process too
    one_stream = """
    from dataclasses import replace
    from specgraph.device import no
    from specgraph.cpu.platform import CAPABILITIES
    from specgraph.cpu.stream import CpuEvent

    class Event(CpuEvent):
        def wait(self, stream=None):
            if self._captured is not None:
                raise RuntimeError("events in a capture are not supported")
            super().wait(stream)

    import specgraph.cpu.stream
    specgraph.cpu.stream.CpuEvent = Event
    Platform.capabilities = replace(CAPABILITIES, fork_in_capture=no("one stream per capture"))
    """
    folder = install(tmp_path / "site", extra=one_stream)
    asked = ["capture.fork-and-join", "capture.unjoined-fork-refused", "capture.fork-refused-if-absent"]
    options = [word for case in asked for word in ("--case", case)]
    done = specgraph(folder, "acme", *options, "--json", str(tmp_path / "r.json"))
    assert done.returncode == 0, done.stdout
    report = load(tmp_path / "r.json")
    assert outcomes(report) == dict(zip(asked, ["absent", "absent", "passed"], strict=True))
    assert {case["reason"] for case in report["cases"]} == {"fork_in_capture: one stream per capture"}


@pytest.mark.parametrize(
    ("words", "said", "jobs"),
    [
        (["nosuch"], "unknown platform 'nosuch'", 0),
        (["acme", "--group", "nosuch"], "there is no group nosuch", 0),
        (["acme", "--case", "capture.nosuch"], "there is no case 'capture.nosuch'", 0),
        (["acme", "--json", "missing/report.json"], "there is no folder missing", 0),
        (["acme", "--markdown", "acme_backend"], "can't be written: ", 0),
        (["acme", "-k", "nothing_of_that_name"], "no case is selected", 0),
        (["acme", "-k", "and and"], "-k 'and and': join words", 0),
        (["acme", "--timeout", "0"], "timeout 0 is not a number of seconds", 0),
        (["acme", "--timeout", "nan"], "timeout nan is not a number of seconds", 0),
        (["acme"], "jobs -1 is not a number of processes", -1),
        (["acme:4"], "index 4 was asked for", 0),
    ],
)
def test_bad_input_is_one_error(tmp_path: Path, words: list[str], said: str, jobs: int) -> None:
    done = specgraph(install(tmp_path / "site"), *words, jobs=jobs)
    assert done.returncode in (1, 2)  # 2: a ConfigError
    assert done.stderr.startswith("specgraph: ")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"code": "raise OSError('libacme.so is missing')\n"}, "libacme.so is missing"),
        ({"code": GOOD.replace("api=PLATFORM_API", "api=99")}, "speaks platform API 99"),
        ({"xfails": "[[xfail]\n"}, "not a readable TOML file"),
        ({"xfails": '[[xfail]]\ncase = "capture.runs-nothing"\n'}, "must have the strings case, owner, reason, link"),
        (
            {
                "extra": """
    from dataclasses import replace
    from specgraph.device import no
    without = replace(CpuPlatform().capabilities, graphs=no("the driver is too old"))
    Platform.capabilities = property(lambda self: without)
    """
            },
            "platform 'acme' has no graphs: the driver is too old",
        ),
    ],
    ids=["import", "api", "toml", "entry", "graphs"],
)
def test_a_bad_backend_is_one_error(tmp_path: Path, options: dict[str, str], said: str) -> None:
    done = specgraph(install(tmp_path / "site", **options), "acme", "--quick")
    assert done.returncode in (1, 2)  # 2: a ConfigError
    assert done.stderr.startswith("specgraph: ")
    assert said in done.stderr
    assert "Traceback" not in done.stderr
