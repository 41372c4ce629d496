"""Runs a hypothesis state machine as a case: seeded, without deadline and database, with one minimal failure."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, errors
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test


class Machine(RuleBasedStateMachine):
    """A state machine whose rules are declared by `step`.

    Attributes:
        steps: the steps of the current run so far, as text.
        failures: for each run that failed, its error and its steps.
    """

    steps: list[str]
    failures: list[str]

    def __init__(self) -> None:
        super().__init__()
        self.steps.clear()


def step(**strategies: Any) -> Callable[[Callable[..., None]], Any]:
    """Declare a rule of a `Machine`. Its calls and failures are noted: hypothesis tells them only if they repeat."""

    def declare(function: Callable[..., None]) -> Any:
        @wraps(function)
        def noted(self: Machine, *by_another: Any, **given: Any) -> None:
            self.steps.append(f"{function.__name__}({', '.join(f'{name}={value}' for name, value in given.items())})")
            try:
                function(self, *by_another, **given)
            except Exception as error:
                self.failures.append(f"{type(error).__name__}: {error}; after: {' '.join(self.steps)}")
                raise

        return rule(**strategies)(noted)

    return declare


def run_machine(machine: type[Machine], members: dict[str, Any], seed: int, examples: int, steps: int) -> None:
    """
    Args:
        members: class attributes of the machine: the platform, and objects shared by all of its runs.
        examples: the number of runs.
        steps: the number of steps in each run.

    Raises:
        AssertionError: the same steps failed once and not again. The message has the first failure and its steps.
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
    failures: list[str] = []
    made = type(machine.__name__, (machine,), {**members, "steps": [], "failures": failures})
    try:
        run_state_machine_as_test(hypothesis.seed(seed)(made), settings=settings)
    except errors.Flaky as error:
        seen = failures[0] if failures else str(error)
        raise AssertionError(f"failed once, and not when the same steps were run again: {seen}") from error
