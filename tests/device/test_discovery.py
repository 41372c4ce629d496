"""Every installed plugin keeps its place in the list, with the reason when it gives no backend."""

from __future__ import annotations

import re

import pytest

from specgraph.device import PLATFORM_API, discover
from specgraph.errors import PlatformError


def test_the_cpu_is_there():
    found = discover()["cpu"]
    assert found.distribution == "specgraph-core"
    assert found.probe().available
    assert found.probe().device_count == 1
    assert not found.backend.accelerator


def test_a_good_plugin(plugins):
    plugins.install_backend("good-plugin")
    found = discover(plugins.entries())["fake"]
    assert (found.distribution, found.version, found.reason) == ("good-plugin", "1.0", "")
    assert found.probe().available


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import a_vendor_package_that_is_not_here", "ModuleNotFoundError.*a_vendor_package_that_is_not_here"),
        ("raise OSError('libdriver.so: cannot open shared object file')", "OSError: libdriver.so"),
        ("1 +", "SyntaxError"),
        ("", "None, not a Backend"),
        (
            """
            from specgraph.device import hookimpl
            @hookimpl
            def specgraph_backend():
                return 'fake'
            """,
            "'fake', not a Backend",
        ),
        (
            """
            from specgraph.device import hookimpl
            @hookimpl
            def specgraph_backends():
                return None
            """,
            "unknown hook 'specgraph_backends'",
        ),
        (
            """
            from specgraph.device import hookimpl
            @hookimpl
            def specgraph_backend():
                raise RuntimeError('broken hook')
            """,
            "broken hook",
        ),
    ],
)
def test_a_bad_plugin_takes_no_other_down(plugins, source, reason):
    plugins.install("bad-plugin", source, name="bad")
    plugins.install_backend("good-plugin", name="good")
    found = discover(plugins.entries())
    assert found["good"].probe().available
    assert found["bad"].backend is None
    probe = found["bad"].probe()
    assert not probe.available
    assert re.search(reason, probe.reason), probe.reason


@pytest.mark.parametrize(
    ("api", "advice"), [(PLATFORM_API + 1, "upgrade specgraph-core"), (PLATFORM_API - 1, "upgrade other-api")]
)
def test_another_api_number(plugins, api, advice):
    plugins.install_backend("other-api", api=api)
    found = discover(plugins.entries())["fake"]
    assert found.backend is None
    assert f"platform API {api}" in found.reason
    assert str(PLATFORM_API) in found.reason
    assert advice in found.reason


@pytest.mark.parametrize(("oldest", "newest"), [(-1, 0), (0, 1), (-2, 3), (1, 2), (-3, -1)])
def test_a_window_of_api_numbers(plugins, oldest, newest):
    """A backend that names its lowest number too is taken by every core between the two, and by no other."""
    plugins.install_backend("other-api", api=f"{PLATFORM_API + newest}, oldest_api={PLATFORM_API + oldest}")
    found = discover(plugins.entries())["fake"]
    assert (found.backend is not None) == (oldest <= 0 <= newest)
    if found.backend is None:
        assert f"speaks platform API {PLATFORM_API + oldest} to {PLATFORM_API + newest}, this" in found.reason
        assert found.reason.endswith(f"upgrade {'specgraph-core' if oldest > 0 else 'other-api'}")


def test_two_plugins_of_one_name(plugins):
    plugins.install_backend("first-plugin")
    plugins.install_backend("second-plugin")
    with pytest.raises(PlatformError, match=r"'fake'.*first-plugin 1\.0.*second-plugin 1\.0"):
        discover(plugins.entries())


def test_a_backend_that_names_no_api_is_listed_with_the_reason(plugins):
    plugins.install(
        "no-api",
        """
        from specgraph.device import Backend, hookimpl
        @hookimpl
        def specgraph_backend():
            return Backend(name="fake", probe=print, open=print)
        """,
    )
    found = discover(plugins.entries())["fake"]
    assert found.backend is None
    assert "failed to load" in found.reason
    assert "'api'" in found.reason


def test_a_probe_that_raises_is_an_answer(plugins):
    plugins.install(
        "raising-probe",
        """
        from specgraph.device import PLATFORM_API, Backend, hookimpl
        def probe():
            raise RuntimeError("the driver crashed")
        @hookimpl
        def specgraph_backend():
            return Backend(name="fake", probe=probe, open=print, api=PLATFORM_API)
        """,
    )
    probe = discover(plugins.entries())["fake"].probe()
    assert not probe.available
    assert "RuntimeError: the driver crashed" in probe.reason
