"""A whole report as a green run on a device makes it, without running anything."""

from __future__ import annotations

from typing import Any

from specgraph_conformance.report import CaseResult, Report, Subject
from specgraph_conformance.standard import SUITE_VERSION, expected_ids

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAMES = ("graphs", "merged_loop", "task_update", "shared_pool", "external_events", "collectives_in_graph",
         "random_in_graph", "host_read_detection", "order_detection", "float8",
         "fork_in_capture")  # fmt: skip


def source(distribution: str, **changes: Any) -> dict[str, Any]:
    """A committed source without changes."""
    about = {"version": "1", "package": "x", "state": "commit", "commit": COMMIT, "changed": [], "digest": "0"}
    return {"distribution": distribution, **about, **changes}


def complete_report(
    absent: tuple[str, ...] = (), own_attention: tuple[str, ...] = (), version: str = SUITE_VERSION, **changes: Any
) -> Report:
    """Every case of a version of the suite, passed, or absent for want of the capabilities `absent`.

    Args:
        changes: other fields of the subject.
    """
    capabilities = {name: {"level": "no" if name in absent else "yes", "reason": f"why {name} is so"} for name in NAMES}
    results = list[CaseResult]()
    for id, listed in expected_ids(own_attention, version).items():
        lacking = [name for name in listed.needs if name in absent]
        too_able = [name for name in listed.unless if name not in absent]
        reason = (
            f"{lacking[0]}: why {lacking[0]} is so"
            if lacking
            else f"the platform has {too_able[0]}"
            if too_able
            else ""
        )
        results.append(CaseResult(id, "What holds.", None, "absent" if reason else "passed", reason))
    about: dict[str, Any] = {
        "platform": "acme",
        "device": "a device",
        "device_kind": "GPU",
        "versions": {"torch": "2.13.0"},
        "capabilities": capabilities,
        "seed": 0,
        "suite": version,
        "attention": own_attention,
        "device_count": 1,
        "environment": {"python": "3.11.7", "system": "Linux 6", "machine": "x86_64", "date": "2026-11-22"},
        "sources": [source("specgraph-core"), source("specgraph-conformance"), source("specgraph-acme")],
    }
    return Report(Subject(**{**about, **changes}), results)
