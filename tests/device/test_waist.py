"""The waist stays small, and what a platform lacks has a reason."""

from __future__ import annotations

import dataclasses

import pytest

from specgraph.cpu import CpuGraph, CpuPlatform
from specgraph.device import Capabilities, Event, Graph, Platform, Stream, no, quirk, yes
from specgraph.errors import PlatformError, UnsupportedError

MOST_ABSTRACT_MEMBERS = 8


def test_at_most_8_abstract_members():
    assert len(Platform.__abstractmethods__) <= MOST_ABSTRACT_MEMBERS, sorted(Platform.__abstractmethods__)


def test_support_is_true_unless_no():
    assert yes()
    assert quirk("under conditions")
    assert not no("why")


def test_every_refused_capability_of_the_cpu_has_a_reason():
    supports = CpuPlatform().capabilities.supports()
    assert {f.name for f in dataclasses.fields(Capabilities) if f.type == "Support"} < supports.keys()
    assert all(s.reason for s in supports.values() if s.level != "yes")


def test_cpu_handles_follow_the_protocols():
    platform = CpuPlatform()
    assert isinstance(platform.stream(), Stream)
    assert isinstance(platform.event(), Event)
    assert isinstance(platform.graph(), Graph)
    assert isinstance(platform.graph(), CpuGraph)
    assert platform.device.type == "cpu"
    assert platform.info.versions["torch"]
    assert platform.memory().total > 1 << 28


def test_task_update_is_refused_with_the_reason_where_absent():
    without = dataclasses.replace(CpuPlatform().capabilities, task_update=no("the device has no such call"))
    platform = CpuPlatform()
    lacking = type("Lacking", (CpuPlatform,), {"capabilities": without})
    with pytest.raises(UnsupportedError, match="no such call"):
        Platform.task_group(lacking())
    with pytest.raises(UnsupportedError):
        Platform.task_update(platform, None)


def test_foreign_handles_are_refused():
    with pytest.raises(PlatformError, match="no stream"), CpuPlatform().use(object()):
        pass
