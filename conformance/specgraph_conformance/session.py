"""One run of the suite on one platform: the opened platform, the planned cases and their results."""

from __future__ import annotations

import platform as system
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from importlib import import_module
from pathlib import Path

import torch
from specgraph.attention import AttentionBackend, AttentionLayer
from specgraph.device import Discovered, Platform, discover, open_platform
from specgraph.errors import ConfigError, PlatformError

from specgraph_conformance.case import Case
from specgraph_conformance.records import RecordFile
from specgraph_conformance.render import check_writable, write_report
from specgraph_conformance.report import UNSTATED, CaseResult, Outcome, Report, Shard, Subject
from specgraph_conformance.rig import CORE_ATTENTION
from specgraph_conformance.shards import ran
from specgraph_conformance.sources import Source, source_of
from specgraph_conformance.standard import SUITE_VERSION, expected_ids, known_versions, listed_cases
from specgraph_conformance.xfails import Xfail, entry_module, find_xfails, read_xfails, unmatched


class Session:
    """Made by `open_session`."""

    def __init__(
        self,
        item: Discovered,
        platform: Platform,
        seed: int,
        xfails: Sequence[Xfail],
        records: RecordFile | None,
        reports: Sequence[Path],
        suite: str | None = None,
    ) -> None:
        self.item, self.platform, self.seed = item, platform, seed
        self._xfails, self._records, self._reports = xfails, records, reports
        self.subject = describe(item, platform, seed, suite or SUITE_VERSION)
        cases = None if suite is None else listed_cases(suite)
        self._ids = None if cases is None else frozenset(expected_ids(cases, self.subject.attention))
        self.problems: list[str] = []
        self._planned: list[Case] = []
        self._shard: Shard | None = None
        self._begin = 0.0
        self._results: dict[str, CaseResult] = {} if records is None else records.results()
        self.finished = frozenset(self._results)

    def check_selection(self, cases: Sequence[Case], asked: Sequence[str]) -> None:
        """Refuse asked ids that match no case; note xfails.toml entries that match none as problems of the run."""
        ids = [case.id for case in cases]
        for wanted in asked:
            if not any(wanted in (id, id.partition("[")[0]) for id in ids):
                raise ConfigError(f"there is no case '{wanted}'")
        self.problems = [
            f"xfails.toml declares '{xfail.case}', and there is no such case: remove or correct the entry"
            for xfail in unmatched(self._xfails, ids)
        ]

    def has(self, case: Case) -> bool:
        """Whether the version of the suite that was asked for has a case."""
        return self._ids is None or case.id in self._ids

    def xfail_of(self, case_id: str) -> Xfail | None:
        """The declared gap that covers a case."""
        supports = self.platform.capabilities.supports()
        return next((xfail for xfail in self._xfails if xfail.matches(case_id) and xfail.applies(supports)), None)

    def plan(self, cases: Sequence[Case], shard: Shard | None = None) -> None:
        """Note all selected cases, in order, including those that an earlier process finished.

        Args:
            shard: the shard that they are, with the places of all of them.
        """
        self._planned, self._shard = list(cases), shard
        if self._records is not None:
            planned = [
                {**asdict(case), "xfail": None if (x := self.xfail_of(case.id)) is None else x.reason} for case in cases
            ]
            plan = {"subject": asdict(self.subject), "problems": self.problems, "planned": planned}
            self._records.write("session", {**plan, "shard": None if shard is None else asdict(shard)})

    def absent(self, case: Case) -> str | None:
        """Why a case does not apply to this platform; None if it does."""
        supports = self.platform.capabilities.supports()
        for name in case.needs:
            if not supports[name]:
                return f"{name}: {supports[name].reason}"
        for name in case.unless:
            if supports[name]:
                return f"the platform has {name}, and the case is about platforms without it"
        return None

    def start(self, case: Case) -> None:
        """Note that a case is running."""
        self._begin = time.monotonic()
        if self._records is not None:
            self._records.write("start", {"id": case.id})

    def finish(self, case: Case, outcome: Outcome, reason: str = "") -> None:
        """Note how a case ended. A failure after a first one (in teardown) does not replace it."""
        if (before := self._results.get(case.id)) is not None and before.outcome == "failed":
            return
        took = round(time.monotonic() - self._begin, 3)
        result = CaseResult(case.id, case.group, case.property, case.hazard, outcome, reason, case.cause, took)
        self._results[case.id] = result
        if self._records is not None:
            self._records.write("result", asdict(result))

    def broken(self) -> str | None:
        """None if the device still computes, else what is wrong with it."""
        try:
            if self.platform.is_capturing():
                return "its stream is still capturing"
            value = torch.full((4,), 3.0, device=self.platform.device) + 1
            self.platform.synchronize()
            if value.tolist() != [4.0] * 4:
                return f"3 + 1 is {value.tolist()} on it"
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    def unhealthy(self, case: Case, reason: str) -> None:
        """Note that nothing more can run in this process."""
        if self._records is not None:
            self._records.write("unhealthy", {"id": case.id, "reason": reason})

    def expire(self, case: Case) -> None:
        """Note that a running case has passed its time limit."""
        if self._records is not None:
            self._records.write("expired", {"id": case.id, "seconds": case.timeout})

    def report(self) -> Report:
        """The report of the cases that have a result."""
        order = [case.id for case in self._planned]
        cases = [self._results[id] for id in order if id in self._results]
        shards = () if self._shard is None else (ran(self._shard, order, self._results),)
        return Report(self.subject, cases, self.problems, shards)

    def write_reports(self) -> None:
        """Write the files named by `--specgraph-report`."""
        for path in self._reports:
            write_report(self.report(), path)


def open_session(
    name: str,
    *,
    seed: int = 0,
    xfails: Path | None = None,
    records: Path | None = None,
    reports: Sequence[Path] = (),
    attention: Sequence[str] = (),
    suite: str | None = None,
) -> Session:
    """Open the platform that a run tests.

    Args:
        attention: `NAME=MODULE:FUNCTION` each: attention backends that are tested as if they were the platform's own.
        suite: the version whose cases run; None for all cases, which is the newest.

    Raises:
        PlatformError: unknown or unavailable, or it has no graphs, which the suite is about.
        ConfigError: a malformed xfails.toml, a report path that can't be written, attention that can't be imported, or
            an unknown version of the suite.
    """
    for path in reports:
        check_writable(path)
    if suite is not None and listed_cases(suite) is None:
        raise ConfigError(f"there is no suite version '{suite}' here; there are {', '.join(known_versions())}")
    given = {word.partition("=")[0]: _attention(word) for word in attention}
    found = discover()
    platform = open_platform(name, found=found)
    if given:
        own = platform.attention_backends()
        platform.attention_backends = lambda: {**own, **given}
    item = found[name.partition(":")[0]]
    if not platform.capabilities.graphs:
        raise PlatformError(
            f"platform '{item.name}' has no graphs: {platform.capabilities.graphs.reason}. The suite tests drafting "
            "through graphs; there is nothing here for it to vouch for."
        )
    path = xfails or find_xfails(item)
    declared = read_xfails(path) if path is not None else ()
    return Session(item, platform, seed, declared, None if records is None else RecordFile(records), reports, suite)


def describe(item: Discovered, platform: Platform, seed: int, suite: str) -> Subject:
    """The platform, device, versions, capabilities and sources of a report."""
    versions = {"torch": torch.__version__, item.distribution: item.version, **platform.info.versions}
    supports = platform.capabilities.supports()
    capabilities = {name: {"level": s.level, "reason": s.reason} for name, s in supports.items()}
    info = platform.info
    return Subject(
        item.name,
        info.device_name,
        info.device_kind or UNSTATED,
        versions,
        capabilities,
        seed,
        suite,
        tested_attention(platform),
        item.probe().device_count,
        environment(),
        [asdict(source) for source in _sources(item)],
    )


def tested_attention(platform: Platform) -> tuple[str, ...]:
    """Names of the device's own attention, without what takes latent layers (DeepSeek) only: no case has those."""
    latent = AttentionLayer(4, 1, 576, 1.0, torch.zeros(1, 64), latent=True)
    values = AttentionLayer(4, 4, 128, 1.0)

    def is_for_latents(backend: AttentionBackend) -> bool:
        supports = getattr(backend, "supports", None)
        return bool(supports and supports(latent, torch.bfloat16, 128) and not supports(values, torch.bfloat16, 128))

    return tuple(name for name, make in platform.attention_backends().items() if not is_for_latents(make(platform)))


def _attention(word: str) -> Callable[[Platform], AttentionBackend]:
    """The factory that `NAME=MODULE:FUNCTION` names."""
    name, equals, place = word.partition("=")
    module, colon, function = place.partition(":")
    if not (name and equals and module and colon and function) or name in CORE_ATTENTION:
        raise ConfigError(
            f"attention '{word}' must be NAME=MODULE:FUNCTION, where FUNCTION(platform) makes an AttentionBackend "
            f"and NAME is none of the core's {', '.join(CORE_ATTENTION)}"
        )
    sys.path.insert(0, "")  # modules of the current folder are found too, as by `specgraph audit`
    try:
        return getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"attention '{word}' can't be imported: {error}") from error
    finally:
        sys.path.remove("")


def environment() -> dict[str, str]:
    """Python, operating system, machine and day of a run."""
    return {
        "python": system.python_version(),
        "system": f"{system.system()} {system.release()}",
        "machine": system.machine(),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def _sources(item: Discovered) -> list[Source]:
    """The core's, the suite's, and the backend's where it is not the core."""
    found = [source_of("specgraph-core", "specgraph"), source_of("specgraph-conformance", "specgraph_conformance")]
    module = entry_module(item)
    if module is not None and item.distribution not in {source.distribution for source in found}:
        found.append(source_of(item.distribution, module.partition(".")[0]))
    return found
