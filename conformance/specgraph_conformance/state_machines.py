"""Runs a hypothesis state machine as a case: seeded, without deadline and database, with one minimal failure."""

from __future__ import annotations

from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test


def run_machine(
    machine: type[RuleBasedStateMachine], members: dict[str, Any], seed: int, examples: int, steps: int
) -> None:
    """
    Args:
        members: class attributes of the machine: the platform, and objects shared by all of its runs.
        examples: the number of runs.
        steps: the number of steps in each run.
    """
    settings = hypothesis.settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
    made = type(machine.__name__, (machine,), members)
    run_state_machine_as_test(hypothesis.seed(seed)(made), settings=settings)
