"""The pytest plugin: opens the platform, decides which cases apply, and records how each ended.

Inert in any other pytest run: it does something only for tests marked by `@case`.
"""

from __future__ import annotations

import faulthandler
import gc
import hashlib
import os
import sys
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from specgraph_conformance.case import GROUPS, MARKER, Absent, Case
from specgraph_conformance.watchdog import import_heavy_modules, limited

if TYPE_CHECKING:
    from specgraph_conformance.report import Shard

PLATFORM_OPTION = "--specgraph-platform"
Selected = list[tuple[pytest.Item, Case]]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("specgraph", "conformance of a specgraph platform")
    group.addoption(PLATFORM_OPTION, metavar="NAME[:INDEX]", help="the platform to test")
    group.addoption("--specgraph-case", action="append", metavar="ID", default=[], help="only this case (repeatable)")
    group.addoption("--specgraph-group", action="append", default=[], choices=GROUPS, help="only this group")
    group.addoption("--specgraph-hazard", action="append", metavar="ID", default=[], help="only cases of this hazard")
    group.addoption("--specgraph-suite", metavar="VERSION", help="the cases of this version; default: the newest")
    group.addoption("--specgraph-shard", metavar="I/N", help="only the cases of the I-th of N shards")
    group.addoption("--specgraph-quick", action="store_true", help="the quick selection")
    group.addoption("--specgraph-seed", type=int, default=0, metavar="N", help="seed of all generated inputs")
    group.addoption("--specgraph-timeout", type=float, metavar="SECONDS", help="for every case, not its own limit")
    group.addoption("--specgraph-xfails", type=Path, metavar="FILE", help="instead of the backend's own xfails.toml")
    group.addoption(
        "--specgraph-attention",
        action="append",
        metavar="NAME=MODULE:FUNCTION",
        default=[],
        help="test FUNCTION(platform)'s AttentionBackend as if it were the platform's own (repeatable)",
    )
    group.addoption("--specgraph-records", type=Path, metavar="FILE", help="append results here as they come")
    group.addoption(
        "--specgraph-report",
        action="append",
        type=Path,
        metavar="FILE",
        default=[],
        help="write the report to FILE: .json, .md or .svg (repeatable)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{MARKER}(case): a conformance case of specgraph")
    option: Any = config.getoption
    name = option(PLATFORM_OPTION)
    if name is None:
        return
    from specgraph.errors import SpecgraphError

    from specgraph_conformance.session import open_session

    try:
        session = open_session(
            name,
            seed=option("--specgraph-seed"),
            xfails=option("--specgraph-xfails"),
            records=option("--specgraph-records"),
            reports=option("--specgraph-report"),
            attention=option("--specgraph-attention"),
            suite=option("--specgraph-suite"),
        )
    except SpecgraphError as error:
        raise pytest.UsageError(str(error)) from error
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = [str(Path(__file__).parent)]  # no path was given: the suite, not the tests of this folder
    config.stash[SESSION] = session
    config.pluginmanager.register(Plugin(config, session), "specgraph-conformance-run")


class Plugin:
    """Runs the suite. Registered only when `--specgraph-platform` names a platform."""

    def __init__(self, config: pytest.Config, session: Any) -> None:
        self.config = config
        self.session = session

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> Generator[None, None, None]:
        from specgraph.errors import SpecgraphError

        option: Any = config.getoption
        marked = [(item, with_parameters(item)) for item in items]
        limit = option("--specgraph-timeout")
        cases = [(item, replace(c, timeout=limit or c.timeout)) for item, c in marked if c is not None]
        order = {id(item): (GROUPS.index(found.group), number) for number, (item, found) in enumerate(cases)}
        cases.sort(key=lambda pair: order[id(pair[0])])
        try:
            self.session.check_selection([found for _, found in cases], option("--specgraph-case"))
        except SpecgraphError as error:
            raise pytest.UsageError(str(error)) from error
        yield  # pytest's own -k and -m
        kept = set(items)
        selected = [(item, found) for item, found in cases if item in kept and self._is_selected(found)]
        if not selected:
            raise pytest.UsageError("no case is selected: no case of the suite meets all that was asked for")
        selected, shard = self._shard(selected)
        done = self.session.finished
        chosen = [pair for pair in selected if pair[1].id not in done]
        for item, found in chosen:
            item.stash[CASE] = found
            if (xfail := self.session.xfail_of(found.id)) is not None:
                item.add_marker(pytest.mark.xfail(reason=f"{xfail.reason} ({xfail.owner}) {xfail.link}", strict=True))
        self.session.plan([found for _, found in selected], shard)
        running = [item for item, _ in chosen]
        config.hook.pytest_deselected(items=[item for item in items if item not in running])
        items[:] = running

    def _shard(self, selected: Selected) -> tuple[Selected, Shard | None]:
        """The cases of the shard that was asked for, and what it is; all cases where none was."""
        from specgraph.errors import SpecgraphError

        from specgraph_conformance.shards import from_ranges, parse_shard, take

        option: Any = self.config.getoption
        if (text := option("--specgraph-shard")) is None:
            return selected, None
        try:
            index, count = parse_shard(text)
        except SpecgraphError as error:
            raise pytest.UsageError(str(error)) from error
        ids, suite = [found.id for _, found in selected], self.session.subject.suite
        shard = take(ids, index, count, suite, self._options())
        if not shard.selected:
            raise pytest.UsageError(f"no case is selected: none of the {len(ids)} that were asked for is in {text}")
        return [selected[place] for place in from_ranges(shard.places)], shard

    def _options(self) -> dict[str, Any]:
        """Options that choose cases or change how they run, as far as they were given."""
        option: Any = self.config.getoption
        names = ("case", "group", "hazard", "quick", "timeout", "attention")
        given = {name: option(f"--specgraph-{name}") for name in names} | {"k": option("-k")}
        if (path := option("--specgraph-xfails")) is not None:
            given["xfails"] = hashlib.sha256(path.read_bytes()).hexdigest()
        return {name: value for name, value in given.items() if value}

    def _is_selected(self, found: Case) -> bool:
        option = self.config.getoption
        ids, groups, hazards = option("--specgraph-case"), option("--specgraph-group"), option("--specgraph-hazard")
        return (
            (not ids or found.id in ids or found.id.partition("[")[0] in ids)
            and (not groups or found.group in groups)
            and (not hazards or found.hazard in hazards)
            and (found.quick or not option("--specgraph-quick"))
            and self.session.has(found)
        )

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        """Before the first case: what torch imports late, and then no more collecting of what is loaded for good."""
        if session.items and not session.config.option.collectonly:
            import_heavy_modules()
            gc.collect()
            gc.freeze()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        found = item.stash.get(CASE, None)
        if found is None:
            return (yield)
        with limited(found.timeout, lambda: self._expired(found)):
            return (yield)

    def _expired(self, found: Case) -> None:
        """End this process: a device call that does not return cannot be interrupted."""
        self.session.expire(found)
        capture: Any = self.config.pluginmanager.getplugin("capturemanager")
        if capture is not None:
            capture.suspend_global_capture(in_=True)
        sys.stderr.write(f"{found.id} did not finish within {found.timeout:g} s; it was at:\n")
        faulthandler.dump_traceback()
        sys.stderr.flush()
        os._exit(UNHEALTHY)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        found = item.stash.get(CASE, None)
        if found is None:
            return
        self.session.start(found)
        if (reason := self.session.absent(found)) is not None:
            pytest.skip(reason)

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
        if found is not None and (report.when == "call" or not report.passed):
            self._record(found, report, call)
        return report

    def _record(self, found: Case, report: pytest.TestReport, call: pytest.CallInfo[None]) -> None:
        session = self.session
        if hasattr(report, "wasxfail"):
            session.finish(found, "xfailed", report.wasxfail)
        elif report.skipped:
            session.finish(found, "absent", _skip_reason(report))
        elif report.passed:
            session.finish(found, "passed")
        else:
            session.finish(found, "failed", _failure(report, call))
        if (report.failed or hasattr(report, "wasxfail")) and (reason := session.broken()) is not None:
            session.unhealthy(found, reason)
            pytest.exit(f"{session.subject.platform} is unusable after {found.id}: {reason}", returncode=UNHEALTHY)

    def pytest_sessionfinish(self) -> None:
        self.session.write_reports()

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.config.getoption("--specgraph-records") is not None:
            return  # whoever reads the records shows them
        from specgraph_conformance.diagnosis import by_cause, look_at
        from specgraph_conformance.render import verdict

        report = self.session.report()
        terminalreporter.section(f"conformance of {report.subject.platform}")
        for problem in report.problems:
            terminalreporter.line(problem)
        for first, *others in by_cause(report.failures):
            terminalreporter.line(f"{first.id}: {first.property}")
            terminalreporter.line(f"    seen: {first.reason.splitlines()[0] if first.reason else ''}")
            terminalreporter.line(f"    hazard: {first.hazard or 'none'}; look at: {look_at(first)}")
            if others:
                terminalreporter.line(f"    and {len(others)} more that saw the same")
            terminalreporter.line(f"    again: {report.rerun_command(first)}")
        terminalreporter.line(verdict(report))


SESSION: pytest.StashKey[Any] = pytest.StashKey()
CASE: pytest.StashKey[Case] = pytest.StashKey()
UNHEALTHY = 77
"""Exit status of a run that stopped because the device did not survive a case."""


def with_parameters(item: pytest.Item) -> Case | None:
    """The case that a test item runs, with its parameters in the id; None for a test that is no conformance case."""
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


def _skip_reason(report: pytest.TestReport) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


def _failure(report: pytest.TestReport, call: pytest.CallInfo[None]) -> str:
    if call.excinfo is None:
        return str(report.longrepr)  # an unexpected pass
    text = call.excinfo.exconly()
    where: Any = call.excinfo.traceback[-1]
    if report.when != "call":
        text = f"in {report.when}: {text}"
    return f"{text[:1500]} (at {where.path.name}:{where.lineno + 1})"
