"""A device seen through two vendors' APIs is one accelerator."""

from __future__ import annotations

import pytest

from specgraph.device import PLATFORM_API, Backend, Discovered, Probe, open_platform
from specgraph.device.cpu import CpuPlatform
from specgraph.errors import PlatformError


class Opened(CpuPlatform):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.opened_as = name


def backend(name: str, *, available: bool = True, supersedes: frozenset[str] = frozenset()) -> Discovered:
    made = Backend(
        name=name,
        probe=lambda: Probe(available=available, reason="" if available else "no device", device_count=1),
        open=lambda index: Opened(name),
        api=PLATFORM_API,
        supersedes=supersedes,
    )
    return Discovered(name, f"dist-{name}", "1", made)


def test_the_superseded_one_is_passed_over_where_both_answer():
    found = {"imitated": backend("imitated"), "real": backend("real", supersedes=frozenset({"imitated"}))}
    assert open_platform(found=found, environ={}).opened_as == "real"


def test_it_is_still_opened_by_name():
    found = {"imitated": backend("imitated"), "real": backend("real", supersedes=frozenset({"imitated"}))}
    assert open_platform("imitated", found=found, environ={}).opened_as == "imitated"


def test_a_backend_that_does_not_answer_supersedes_nothing():
    found = {
        "imitated": backend("imitated"),
        "real": backend("real", available=False, supersedes=frozenset({"imitated"})),
    }
    assert open_platform(found=found, environ={}).opened_as == "imitated"


def test_two_that_do_not_supersede_each_other_are_an_error():
    found = {"one": backend("one"), "two": backend("two")}
    with pytest.raises(PlatformError, match="several accelerators are available: one, two"):
        open_platform(found=found, environ={})
