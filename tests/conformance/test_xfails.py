"""Declared gaps: which devices they are expected of."""

from __future__ import annotations

import pytest
from specgraph_conformance.xfails import Xfail, read_xfails

from specgraph.device import quirk, yes
from specgraph.errors import ConfigError

ENTRY = '[[xfail]]\ncase = "streams.x"\nowner = "vendor"\nreason = "known"\nlink = ""\n'


def test_a_gap_may_be_of_some_devices_only(tmp_path):
    path = tmp_path / "xfails.toml"
    path.write_text(ENTRY + 'when = "one wait a record"\n')
    (gap,) = read_xfails(path)
    assert gap.applies({"graphs": yes(), "external_events": quirk("the driver takes one wait a record")})
    assert not gap.applies({"graphs": yes(), "external_events": quirk("an event must be recorded first")})
    assert Xfail("streams.x", "vendor", "known", "").applies({"graphs": yes()})


def test_an_unknown_key_is_refused(tmp_path):
    path = tmp_path / "xfails.toml"
    path.write_text(ENTRY + 'where = "here"\n')
    with pytest.raises(ConfigError, match="must have the strings case"):
        read_xfails(path)
