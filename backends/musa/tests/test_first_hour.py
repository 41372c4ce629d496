"""The script for a person with a device, on the stand-in."""

from __future__ import annotations

import pytest

import first_hour


def test_every_question_is_there_and_its_child_s_end_is_kept(monkeypatch):
    assert sorted({int(name.partition("-")[0]) for name in first_hour.ASKED}) == [*range(1, 23)]
    monkeypatch.setattr(first_hour.sys, "executable", "/bin/false")
    assert first_hour.ask("1-versions", False)["ended"] == 1


QUICK = [name for name in first_hour.ASKED if name.partition("-")[0] in {"1", "2", "4", "7", "8", "12", "14"}]


@pytest.mark.parametrize("name", QUICK)
def test_a_question_is_answered(musa, name):
    answer = first_hour.ASKED[name][0]()
    if name.startswith("12"):
        assert answer["seen"] == answer["expected"]
    if name.startswith("8"):
        assert answer["works then"] is True
