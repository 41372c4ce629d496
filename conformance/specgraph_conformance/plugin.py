"""The pytest plugin: opens the platform, decides which cases apply, and runs them with their time limits.

Inert in any other pytest run: it does something only for tests marked by `@case`. With `pytest -n`, cases run in
xdist's workers: a case that hangs or crashes ends its worker, and xdist starts another one for the cases that are left.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import time
from collections.abc import Generator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from specgraph_conformance.case import GROUPS, MARKER, Absent, Case
from specgraph_conformance.timeouts import load_factor

PLATFORM_OPTION = "--specgraph-platform"
RESULT = "specgraph_result"
"""The user property of a test report that holds the fields of its `CaseResult`."""
SESSION: pytest.StashKey[Any] = pytest.StashKey()
CASE: pytest.StashKey[Case] = pytest.StashKey()
RESULTS: pytest.StashKey[Any] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("specgraph", "conformance of a specgraph platform")
    group.addoption(PLATFORM_OPTION, metavar="NAME[:INDEX]", help="the platform to test")
    group.addoption("--specgraph-case", action="append", metavar="ID", default=[], help="only this case (repeatable)")
    group.addoption("--specgraph-group", action="append", default=[], choices=GROUPS, help="only this group")
    group.addoption("--specgraph-hazard", action="append", metavar="ID", default=[], help="only cases of this hazard")
    group.addoption("--specgraph-quick", action="store_true", help="the quick selection")
    group.addoption("--specgraph-seed", type=int, default=0, metavar="N", help="seed of all generated inputs")
    group.addoption("--specgraph-timeout", type=float, metavar="SECONDS", help="for every case, not its own limit")
    group.addoption("--specgraph-xfails", metavar="FILE", help="instead of the backend's own xfails.toml")
    group.addoption(
        "--specgraph-attention",
        action="append",
        metavar="NAME=MODULE:FUNCTION",
        default=[],
        help="test FUNCTION(platform)'s AttentionBackend as if it were the platform's own (repeatable)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{MARKER}(case): a conformance case of specgraph")
    option: Any = config.getoption
    name = option(PLATFORM_OPTION)
    if name is None:
        return
    from specgraph.errors import SpecgraphError

    from specgraph_conformance.results import Results
    from specgraph_conformance.session import open_session

    try:
        session = open_session(
            name,
            seed=option("--specgraph-seed"),
            xfails=option("--specgraph-xfails"),
            attention=option("--specgraph-attention"),
        )
    except SpecgraphError as error:
        raise pytest.UsageError(str(error)) from error
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = [str(Path(__file__).parent)]  # no path was given: the suite, not the tests of this folder
    config.stash[SESSION] = session
    if not option("numprocesses", None):
        config.pluginmanager.register(Plugin(config), "specgraph-conformance-run")
    if not is_worker(config):
        config.stash[RESULTS] = Results(session, option("--specgraph-timeout"))
        config.pluginmanager.register(config.stash[RESULTS], "specgraph-conformance-results")


class Plugin:
    """Runs cases. Registered only when `--specgraph-platform` names a platform."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self._begin = 0.0
        self._broken = ""
        self._stderr = os.dup(2)  # not what pytest captures

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Generator[None, None, None]:
        cases = [(item, found) for item in items if (found := with_parameters(item)) is not None]
        cases.sort(key=lambda pair: GROUPS.index(pair[1].group))
        try:
            yield  # pytest's own -k and -m
            self._select(cases, items)
        except pytest.UsageError as error:
            self._say("refused", str(error))
            if not is_worker(self.config):
                raise
            items.clear()  # an error would end this worker without saying why

    def _select(self, cases: list[tuple[pytest.Item, Case]], items: list[pytest.Item]) -> None:
        option: Any = self.config.getoption
        ids = {name for _, found in cases for name in (found.id, found.id.partition("[")[0])}
        for wanted in option("--specgraph-case"):
            if wanted not in ids:
                raise pytest.UsageError(f"there is no case '{wanted}'")
        self._say("problems", self.config.stash[SESSION].problems(ids))
        kept = set(items)
        selected = [(item, found) for item, found in cases if item in kept and self._is_selected(found)]
        if not selected:
            raise pytest.UsageError("no case is selected: no case of the suite meets all that was asked for")
        for item, found in selected:
            item.stash[CASE] = replace(found, timeout=option("--specgraph-timeout") or found.timeout)
            if (xfail := self.config.stash[SESSION].xfail_of(found.id)) is not None:
                item.add_marker(pytest.mark.xfail(reason=xfail.text, strict=True))
        running = [item for item, _ in selected]
        self.config.hook.pytest_deselected(items=[item for item in items if item not in running])
        items[:] = running

    def _is_selected(self, found: Case) -> bool:
        option = self.config.getoption
        ids, groups, hazards = option("--specgraph-case"), option("--specgraph-group"), option("--specgraph-hazard")
        return (
            (not ids or found.id in ids or found.id.partition("[")[0] in ids)
            and (not groups or found.group in groups)
            and (not hazards or found.hazard in hazards)
            and (found.quick or not option("--specgraph-quick"))
        )

    def _say(self, name: str, value: Any) -> None:
        """Tell `Results`, which is in another process where this one is a worker."""
        if is_worker(self.config):
            self.config.workeroutput[name] = value  # pyright: ignore
        else:
            self.config.stash[RESULTS].said[name] = value

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        """Collect no more, before the first case, of what is loaded for good."""
        if session.items and not session.config.option.collectonly:
            if is_worker(self.config):
                import torch

                workers: int = self.config.workerinput["workercount"]  # pyright: ignore
                torch.set_num_threads(max(1, torch.get_num_threads() // workers))
            gc.collect()
            gc.freeze()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """End a worker whose device did not survive the case."""
        done = yield
        faulthandler.cancel_dump_traceback_later()
        if self._broken:
            if is_worker(self.config):
                os._exit(UNHEALTHY)
            pytest.exit(self._broken, returncode=UNHEALTHY)
        return done

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        found = item.stash.get(CASE, None)
        self._begin = time.monotonic()
        self._limit(found)
        if found is not None and (reason := self.config.stash[SESSION].absent(found)) is not None:
            pytest.skip(reason)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        self._limit(item.stash.get(CASE, None))  # pytest drops the limit when a test fails

    def _limit(self, found: Case | None) -> None:
        """End this process, with the stacks of its threads, if the case takes too long.

        Nothing else ends a device call that does not return; it may hold Python's lock, so that no thread can.
        """
        if found is not None:
            faulthandler.dump_traceback_later(found.timeout * load_factor(), exit=True, file=self._stderr)

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
        try:
            return (yield)
        except Absent as error:
            pytest.skip(str(error))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        found = item.stash.get(CASE, None)
        if found is None or (report.when != "call" and report.passed):
            return report
        from specgraph_conformance.report import result_of

        declared = hasattr(report, "wasxfail")
        if declared:
            outcome, reason = "xfailed", report.wasxfail
        elif report.skipped:
            outcome, reason = "absent", _skip_reason(report)
        else:
            outcome, reason = ("passed", "") if report.passed else ("failed", _failure(report, call))
        took = round(time.monotonic() - self._begin, 3)
        report.user_properties.append((RESULT, asdict(result_of(found, outcome, reason, took))))
        if (report.failed or declared) and (broken := self.config.stash[SESSION].broken()) is not None:
            self._broken = f"{self.config.stash[SESSION].subject.platform} is unusable after {found.id}: {broken}"
        return report


UNHEALTHY = 77
"""Exit status of a process that stopped because the device did not survive a case."""


def with_parameters(item: pytest.Item) -> Case | None:
    """Return the case that a test item runs, with its parameters in the id; None for a test that is no case."""
    marker = item.get_closest_marker(MARKER)
    if marker is None:
        return None
    declared: Case = marker.args[0]
    callspec = getattr(item, "callspec", None)
    return declared if callspec is None else replace(declared, id=f"{declared.id}[{callspec.id}]")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A case that was collected without a platform: say how to give one."""
    if item.get_closest_marker(MARKER) is not None and SESSION not in item.config.stash:
        pytest.exit(f"conformance cases need {PLATFORM_OPTION} NAME", returncode=4)


def is_worker(config: pytest.Config) -> bool:
    """Return True where xdist started this process; it documents this attribute as the sign."""
    return hasattr(config, "workerinput")


def _skip_reason(report: pytest.TestReport) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


def _failure(report: pytest.TestReport, call: pytest.CallInfo[None]) -> str:
    if call.excinfo is None:
        return str(report.longrepr)  # an unexpected pass
    seen = call.excinfo.exconly().splitlines()
    text = "\n".join(
        line for line in seen if line.strip() and "Use -v" not in line
    )  # pytest's hint: no run here has it
    where: Any = call.excinfo.traceback[-1]
    if report.when != "call":
        text = f"in {report.when}: {text}"
    return f"{text[:1500]} (at {Path(where.path).name}:{where.lineno + 1})"
