"""The pytest plugin: opens the platform, decides which cases apply, and runs them with their time limits.

It acts only on tests marked by `@case`, and does nothing in any other pytest run. With `pytest -n`, cases run in
xdist's workers. A case that hangs or crashes ends its worker, and xdist starts another one for the remaining cases.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import re
from collections.abc import Generator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from specgraph_conformance.case import GROUPS, MARKER, Absent, Case
from specgraph_conformance.timeouts import load_factor

PLATFORM_OPTION = "--specgraph-platform"
RESULT = "specgraph_result"
"""The user property of a test report that holds the fields of the `CaseResult`."""
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
    group.addoption("--specgraph-examples", type=int, default=1, metavar="N", help="N times the random examples")
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
        config.args = [str(Path(__file__).parent)]  # without a path, run the suite, not the tests of the current folder
    config.stash[SESSION] = session
    if not option("numprocesses", None):
        config.pluginmanager.register(Plugin(config), "specgraph-conformance-run")
    if not is_worker(config):
        config.stash[RESULTS] = Results(session, option("--specgraph-timeout"))
        config.pluginmanager.register(config.stash[RESULTS], "specgraph-conformance-results")


class Plugin:
    """Runs cases. It is registered only if `--specgraph-platform` names a platform."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self._broken = ""
        self._stderr = os.dup(2)  # pytest does not capture this one

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Generator[None, None, None]:
        cases = [(item, found) for item in items if (found := with_parameters(item)) is not None]
        cases.sort(key=lambda pair: GROUPS.index(pair[1].group))
        for item, found in cases:
            item.extra_keyword_matches.add(found.id)  # -k takes ids as reports print them
        try:
            yield  # here pytest applies -k and -m
            self._select(cases, items)
        except pytest.UsageError as error:
            self._say("refused", str(error))
            if not is_worker(self.config):
                raise
            items.clear()  # an error would end this worker without its message

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
            times = option("--specgraph-examples") if "examples" in getattr(item, "fixturenames", ()) else 1
            item.stash[CASE] = replace(found, timeout=option("--specgraph-timeout") or found.timeout * times)
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
        """Pass a value to `Results`. If this process is a worker, `Results` is in another process."""
        if is_worker(self.config):
            self.config.workeroutput[name] = value  # pyright: ignore
        else:
            self.config.stash[RESULTS].said[name] = value

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        """Before the first case, take all objects that exist out of garbage collection, and divide the CPU's threads
        among the workers."""
        if session.items and not session.config.option.collectonly:
            if is_worker(self.config):
                import torch

                workers: int = self.config.workerinput["workercount"]  # pyright: ignore
                torch.set_num_threads(max(1, torch.get_num_threads() // workers))
            gc.collect()
            gc.freeze()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """End this worker if its device did not survive the case."""
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
        self._limit(found)
        if found is not None and (reason := self.config.stash[SESSION].absent(found)) is not None:
            pytest.skip(reason)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        self._limit(item.stash.get(CASE, None))  # pytest drops the limit when a test fails

    def _limit(self, found: Case | None) -> None:
        """End this process and print the stacks of its threads if the case takes too long.

        A device call that does not return can't be ended otherwise. It may hold Python's lock, so that no other thread
        runs.
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
        report.user_properties.append((RESULT, asdict(result_of(found, outcome, reason))))
        if (report.failed or declared) and (broken := self.config.stash[SESSION].broken()) is not None:
            self._broken = f"{self.config.stash[SESSION].subject.platform} is unusable after {found.id}: {broken}"
        return report


UNHEALTHY = 77
"""The exit status of a process that stopped because its device did not survive a case."""


def with_parameters(item: pytest.Item) -> Case | None:
    """Return the case that a test item runs, with its parameters in the id. None if the test is no case."""
    marker = item.get_closest_marker(MARKER)
    if marker is None:
        return None
    declared: Case = marker.args[0]
    callspec = getattr(item, "callspec", None)
    return declared if callspec is None else replace(declared, id=f"{declared.id}[{callspec.id}]")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse a case that runs without a platform, and say how to name one."""
    if item.get_closest_marker(MARKER) is not None and SESSION not in item.config.stash:
        pytest.exit(f"conformance cases need {PLATFORM_OPTION} NAME", returncode=4)


def is_worker(config: pytest.Config) -> bool:
    """Return True if xdist started this process. xdist documents this attribute for the purpose."""
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
    )  # drop pytest's hint about -v, which the suite's runs don't take
    text = re.sub(
        r"^Failed: DID NOT RAISE (?:<class ')?(?:\w+\.)*(\w+)", r"no error came where the case expects \1", text
    )
    text = text.removesuffix("'>")
    places: list[Any] = [place for place in call.excinfo.traceback if "_pytest" not in Path(place.path).parts]
    where = places[-1]
    if report.when != "call":
        text = f"in {report.when}: {text}"
    return f"{text[:1500]} (at {Path(where.path).name}:{where.lineno + 1})"
