"""How a program becomes graph launches, and which passes run from graphs at all.

The lowering of the draft loop: `eager` runs op by op; `piecewise` captures between attention calls; `step` captures the
first step and one later step; `merged` captures the whole loop; `round`, which needs a target, captures the loop and
the verify after it. Programs without a loop (prefill, verify) are always one launch. Which lowering is used follows
from the graph mode, which target and drafter share, and from the platform.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

from specgraph.capture.attend import PassMode
from specgraph.capture.dispatch import BatchDescriptor
from specgraph.device import LOWERINGS, Capabilities, LoweringName
from specgraph.errors import ConfigError, UnsupportedError

StepKind = Literal["together", "alike", "distinct"]
"""How the steps of a program may be captured. together: always in one launch. alike: a draft loop whose later steps are
the same computation, so that one captured step is replayed for all of them. distinct: a draft loop whose later steps
differ, so that each has a graph of its own."""


class GraphMode(Enum):
    """Which passes run from graphs. *decode* passes are uniform batches (verify, propose), *prefill* passes prompts."""

    NONE = ("eager", "eager")
    """Nothing is captured."""
    PIECEWISE = ("piecewise", "piecewise")
    """Graphs between attention calls; attention itself is eager."""
    FULL = ("full", "full")
    """Every pass is captured whole."""
    FULL_DECODE_ONLY = ("full", "eager")
    """Uniform batches are captured whole, prompts run eagerly."""
    FULL_AND_PIECEWISE = ("full", "piecewise")
    """Uniform batches are captured whole, prompts between attention calls."""

    def __init__(self, decode: PassMode, prefill: PassMode) -> None:
        self.decode: PassMode = decode
        self.prefill: PassMode = prefill

    def __str__(self) -> str:
        return self.name

    @classmethod
    def named(cls, name: str) -> GraphMode:
        """The mode of that name.

        Raises:
            ConfigError: there is none.
        """
        if name not in cls.__members__:
            raise ConfigError(f"unknown graph mode '{name}'; there are auto, {', '.join(cls.__members__)}")
        return cls[name]


@dataclass(frozen=True, slots=True)
class Launch:
    """One replay, or one eager call, of a program."""

    descriptor: BatchDescriptor
    """The key of the graph."""
    captured_steps: tuple[int, ...]
    """The steps that the graph was captured with: what its update plan is keyed by."""
    steps: tuple[int, ...]
    """The steps that this launch computes. They differ where one captured step serves all later ones."""


def launches(
    lowering: LoweringName, batch: BatchDescriptor, num_steps: int, step_kind: StepKind, later_rows: int = 1
) -> tuple[Launch, ...]:
    """The launches of one padded batch, in order.

    `eager` calls what `merged` would capture; `piecewise` has the launches of `step`, each split around attention.

    Args:
        later_rows: rows per request in the later steps, where they are alike.
    """
    every = tuple(range(num_steps))
    if step_kind == "together" or lowering in ("round", "merged", "eager"):
        return (Launch(batch, every, every),)
    first = Launch(replace(batch, phase="first"), (0,), (0,))
    batch = replace(batch, binding=0)  # later steps read no tensor of a binding
    if step_kind == "distinct":
        return (first, *(Launch(replace(batch, phase="step", step=k), (k,), (k,)) for k in every[1:]))
    later = replace(batch, phase="step", query_len=later_rows)
    return (first, *(Launch(later, (1,), (k,)) for k in every[1:]))


_EVERY: tuple[LoweringName, ...] = (*LOWERINGS, "round")

LOWERINGS_OF: Mapping[PassMode, tuple[LoweringName, ...]] = {
    "eager": ("eager",),
    "piecewise": ("piecewise",),
    "full": ("merged", "step"),
}
"""The lowerings of the draft loop that go with a mode's decode passes, strongest first."""


@dataclass(frozen=True, slots=True)
class Resolution:
    """The lowering that was chosen, the reason why each stronger one was not, and the graph mode."""

    lowering: LoweringName
    refusals: dict[str, str]
    mode: GraphMode

    def explain(self) -> str:
        """One line for a person: the lowering, and what was refused."""
        refused = "; ".join(f"{name} refused: {reason}" for name, reason in self.refusals.items())
        return f"{self.lowering}" + (f" ({refused})" if refused else "")


def refusal(lowering: LoweringName, capabilities: Capabilities, host_parameters: tuple[str, ...]) -> str | None:
    """Why a platform can't run a lowering with an attention backend; None if it can."""
    if lowering == "eager":
        return None
    if not capabilities.graphs:
        return f"the platform has no graphs: {capabilities.graphs.reason}"
    if lowering in ("round", "merged") and not capabilities.merged_loop:
        return f"the platform can't capture the whole loop: {capabilities.merged_loop.reason}"
    if lowering in ("round", "merged", "step") and host_parameters and not capabilities.task_update:
        return (
            f"attention takes {', '.join(host_parameters)} from the host, and the platform can't update captured "
            f"tasks: {capabilities.task_update.reason}"
        )
    return None


def resolve(asked: str, capabilities: Capabilities, host_parameters: tuple[str, ...], mode: str = "auto") -> Resolution:
    """The lowering and mode to use; where one is `auto`, the strongest one that is possible and fits the other.

    Raises:
        UnsupportedError: a named lowering or mode is not possible here; the message has the reason.
        ConfigError: there is no lowering or mode of that name, or the two contradict each other.
    """
    if mode == "auto":
        every = tuple(reversed(LOWERINGS)) if asked == "auto" else (_named(asked),)
        found = _strongest(asked, every, capabilities, host_parameters, f"lowering '{asked}'")
        return Resolution(found.lowering, found.refusals, _fastest_mode(found.lowering, host_parameters))
    named = GraphMode.named(mode)
    names = LOWERINGS_OF[named.decode]
    if asked == "round" and named.decode == "full":
        names = ("round",)
    elif asked != "auto" and _named(asked) not in names:
        raise ConfigError(
            f"lowering '{asked}' contradicts graph mode {named}, whose drafter runs {' or '.join(names)}; "
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
    """The first of `names` that is possible; for `auto`, none that is stronger than the platform's default."""
    refusals: dict[str, str] = {}
    for name in names:
        reason = refusal(name, capabilities, host_parameters)
        above = _EVERY.index(name) > _EVERY.index(capabilities.default_lowering)
        if reason is None and asked == "auto" and above:
            reason = f"the platform's default is {capabilities.default_lowering}"
        if reason is None:
            return Resolution(name, refusals, _fastest_mode(name, host_parameters))
        refusals[name] = reason
    reasons = [f"{name}: {reason}" for name, reason in refusals.items()] if len(refusals) > 1 else refusals.values()
    raise UnsupportedError(f"{what} is not possible here: {'; '.join(reasons)}")


def _fastest_mode(lowering: LoweringName, host_parameters: tuple[str, ...]) -> GraphMode:
    """Prompts are captured whole where the device knows the lengths: their attention needs no update then."""
    if lowering == "eager":
        return GraphMode.NONE
    if lowering == "piecewise":
        return GraphMode.PIECEWISE
    return GraphMode.FULL_AND_PIECEWISE if host_parameters else GraphMode.FULL


def _named(asked: str) -> LoweringName:
    for name in _EVERY:
        if name == asked:
            return name
    raise ConfigError(f"unknown lowering '{asked}'; there are auto, {', '.join(_EVERY)}")
