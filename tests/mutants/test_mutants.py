"""Each bug of the field, put back on purpose, is failed by a case of the suite or by a test that names it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from mutants.all import MUTANTS
from mutants.hazards import HAZARDS, NOT_PUT_BACK
from mutants.run import Verdict, judging

BROKEN_MUTANT = ("TypeError", "AttributeError", "NameError")
"""Errors of a mutant that was not changed with the function that it replaces."""


@pytest.fixture(scope="module")
def judge() -> Iterator[Callable[[str], Verdict]]:
    with judging() as judge:
        yield judge


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_killed_by_name(name: str, judge: Callable[[str], Verdict]) -> None:
    verdict = judge(name)
    print(verdict)
    assert verdict.num_cases > 0, "nothing names this hazard, or what does could not start"
    assert verdict.killed_by, f"{verdict.num_cases} cases and tests passed although: {MUTANTS[name].bug}"
    assert not verdict.reason.startswith(BROKEN_MUTANT), f"the mutant itself is broken: {verdict.reason}"


def test_every_hazard_is_put_back_or_says_why_not() -> None:
    put_back = {mutant.hazard for mutant in MUTANTS.values()}
    assert set(HAZARDS) == put_back | set(NOT_PUT_BACK)
    assert not put_back & set(NOT_PUT_BACK)
    assert len(MUTANTS) >= 30
    assert all(mutant.bug for mutant in MUTANTS.values())
