"""How a draft program becomes launches: which steps are captured together, and in what order they run.

A lowering is data: a list of launches. Each names the graph (its phase), the steps its body was captured with, and the
steps it stands for in this propose. `step` replays one captured step K - 1 times; `merged` captures all K at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from specgraph.errors import ConfigError, UnsupportedError
from specgraph.graphs import Phase
from specgraph.platforms import LOWERINGS, Capabilities, LoweringName


@dataclass(frozen=True, slots=True)
class Launch:
    """One replay (or one eager call) of a propose."""

    phase: Phase
    captured_steps: tuple[int, ...]
    """Draft steps of the body as captured: the steps that its update plan is keyed by."""
    steps: tuple[int, ...]
    """Draft steps it stands for here."""


def launches(lowering: LoweringName, num_steps: int, steps_differ: bool = False) -> list[Launch]:
    """The launches of one propose with `num_steps` passes.

    `eager` calls what `merged` would capture; `piecewise` has the launches of `step`, each with eager attention.

    Args:
        steps_differ: each later step is a computation of its own and can't stand for another.
    """
    every = tuple(range(num_steps))
    if lowering in ("merged", "eager"):
        return [Launch("propose", every, every)]
    return [Launch("first", (0,), (0,)), *(Launch("step", (k if steps_differ else 1,), (k,)) for k in every[1:])]


@dataclass(frozen=True, slots=True)
class Resolution:
    """The lowering that was chosen, and why each stronger one was not."""

    lowering: LoweringName
    refusals: dict[str, str]

    def explain(self) -> str:
        """One line for a person."""
        refused = "; ".join(f"{name} refused: {reason}" for name, reason in self.refusals.items())
        return f"{self.lowering}" + (f" ({refused})" if refused else "")


def refusal(lowering: LoweringName, capabilities: Capabilities, host_parameters: tuple[str, ...]) -> str | None:
    """Why a platform can't run a lowering with an attention backend; None if it can."""
    if lowering == "eager":
        return None
    if not capabilities.graphs:
        return f"the platform has no graphs: {capabilities.graphs.reason}"
    if lowering == "merged" and not capabilities.merged_loop:
        return f"the platform can't capture the whole loop: {capabilities.merged_loop.reason}"
    if lowering in ("merged", "step") and host_parameters and not capabilities.task_update:
        return (
            f"attention takes {', '.join(host_parameters)} from the host, and the platform can't update captured "
            f"tasks: {capabilities.task_update.reason}"
        )
    return None


def resolve(asked: str, capabilities: Capabilities, host_parameters: tuple[str, ...]) -> Resolution:
    """The asked lowering, or for `auto` the strongest allowed one not above the platform's default.

    Raises:
        UnsupportedError: a named lowering is not possible here; the message has the reason.
        ConfigError: there is no lowering of that name.
    """
    if asked != "auto":
        return Resolution(_named(asked, capabilities, host_parameters), {})
    refusals: dict[str, str] = {}
    for name in reversed(LOWERINGS):
        reason = refusal(name, capabilities, host_parameters)
        if reason is None and LOWERINGS.index(name) > LOWERINGS.index(capabilities.default_lowering):
            reason = f"the platform's default is {capabilities.default_lowering}"
        if reason is None:
            return Resolution(name, refusals)
        refusals[name] = reason
    raise AssertionError("eager is never refused")


def _named(asked: str, capabilities: Capabilities, host_parameters: tuple[str, ...]) -> LoweringName:
    for name in LOWERINGS:
        if name == asked:
            if (reason := refusal(name, capabilities, host_parameters)) is not None:
                raise UnsupportedError(f"lowering '{asked}' is not possible here: {reason}")
            return name
    raise ConfigError(f"unknown lowering '{asked}'; there are auto, {', '.join(LOWERINGS)}")
