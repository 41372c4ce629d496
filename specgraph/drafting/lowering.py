"""How a draft program becomes launches: which steps are captured together, and in what order they run.

A lowering is data: a list of launches. Each names the graph (its phase), the steps its body was captured with, and the
steps it stands for in this propose. `step` replays one captured step K - 1 times; `merged` captures all K at once.
Which lowering is used follows from the graph mode, that target and drafter share, and from what the platform can do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specgraph.errors import ConfigError, UnsupportedError
from specgraph.graphs import GraphMode, PassMode, Phase
from specgraph.platforms import LOWERINGS, Capabilities, LoweringName


@dataclass(frozen=True, slots=True)
class Launch:
    """One replay (or one eager call) of a propose."""

    phase: Phase
    captured_steps: tuple[int, ...]
    """Draft steps of the body as captured: the steps that its update plan is keyed by."""
    steps: tuple[int, ...]
    """Draft steps it stands for here."""


def launches(lowering: LoweringName, num_steps: int, steps_differ: bool) -> list[Launch]:
    """The launches of one propose with `num_steps` passes.

    `eager` calls what `merged` would capture; `piecewise` has the launches of `step`, each with eager attention.

    Args:
        steps_differ: each later step is a computation of its own and can't stand for another.
    """
    every = tuple(range(num_steps))
    if lowering in ("merged", "eager"):
        return [Launch("propose", every, every)]
    return [Launch("first", (0,), (0,)), *(Launch("step", (k if steps_differ else 1,), (k,)) for k in every[1:])]


LOWERINGS_OF: Mapping[PassMode, tuple[LoweringName, ...]] = {
    "eager": ("eager",),
    "piecewise": ("piecewise",),
    "full": ("merged", "step"),
}
"""What a mode's decode passes mean for the draft loop, strongest first."""


@dataclass(frozen=True, slots=True)
class Resolution:
    """The lowering that was chosen, why each stronger one was not, and the mode it belongs to."""

    lowering: LoweringName
    refusals: dict[str, str]
    mode: GraphMode

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


def resolve(asked: str, capabilities: Capabilities, host_parameters: tuple[str, ...], mode: str = "auto") -> Resolution:
    """The asked lowering and mode; where one is `auto`, the strongest allowed one that goes with the other.

    Raises:
        UnsupportedError: a named lowering or mode is not possible here; the message has the reason.
        ConfigError: there is no lowering or mode of that name, or the two contradict each other.
    """
    if mode == "auto":
        every = tuple(reversed(LOWERINGS)) if asked == "auto" else (_named(asked),)
        found = _strongest(asked, every, capabilities, host_parameters, f"lowering '{asked}'")
        return Resolution(found.lowering, found.refusals, _fastest_mode(found.lowering))
    named = GraphMode.named(mode)
    names = LOWERINGS_OF[named.decode]
    if asked != "auto" and _named(asked) not in names:
        raise ConfigError(
            f"lowering '{asked}' contradicts graph mode {named}, whose drafter is {' or '.join(names)}; "
            "leave one of them at auto"
        )
    if named.prefill == "full" and (reason := refusal("step", capabilities, host_parameters)) is not None:
        raise UnsupportedError(f"graph mode {named} is not possible here: {reason}")
    names = names if asked == "auto" else (_named(asked),)
    found = _strongest(asked, names, capabilities, host_parameters, f"graph mode {named}")
    return Resolution(found.lowering, found.refusals, named)


def _strongest(
    asked: str, names: Sequence[LoweringName], capabilities: Capabilities, host_parameters: tuple[str, ...], what: str
) -> Resolution:
    """The first of `names` that nothing refuses; for `auto`, not above the platform's default."""
    refusals: dict[str, str] = {}
    for name in names:
        reason = refusal(name, capabilities, host_parameters)
        above = LOWERINGS.index(name) > LOWERINGS.index(capabilities.default_lowering)
        if reason is None and asked == "auto" and above:
            reason = f"the platform's default is {capabilities.default_lowering}"
        if reason is None:
            return Resolution(name, refusals, _fastest_mode(name))
        refusals[name] = reason
    reasons = [f"{name}: {reason}" for name, reason in refusals.items()] if len(refusals) > 1 else refusals.values()
    raise UnsupportedError(f"{what} is not possible here: {'; '.join(reasons)}")


def _fastest_mode(lowering: LoweringName) -> GraphMode:
    if lowering == "eager":
        return GraphMode.NONE
    return GraphMode.PIECEWISE if lowering == "piecewise" else GraphMode.FULL_AND_PIECEWISE


def _named(asked: str) -> LoweringName:
    for name in LOWERINGS:
        if name == asked:
            return name
    raise ConfigError(f"unknown lowering '{asked}'; there are auto, {', '.join(LOWERINGS)}")
