"""Lowerings: the launches that a program becomes, and the choice of passes that run from graphs.

Programs without draft steps (prefill, verify) are always one launch. The option `decode` names the lowering, and
`prefill` how prompts run. Target and drafter share both. With `auto` the platform decides.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from specgraph.capture.attend import PassMode
from specgraph.capture.dispatch import BatchDescriptor
from specgraph.capture.program import Program
from specgraph.config import LoweringChoice, PrefillChoice
from specgraph.device import LOWERINGS, Capabilities, LoweringName
from specgraph.errors import UnsupportedError

Collectives = Literal["none", "in_attention", "anywhere"]
"""The parts of a model's passes that have collectives. With "in_attention" a piecewise pass captures none of them."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One replay, or one eager call, of a program."""

    descriptor: BatchDescriptor
    """The key of the graph."""
    captured_steps: tuple[int, ...]
    """The draft steps that the graph was captured with. They are the keys of its update plan."""
    steps: tuple[int, ...]
    """The draft steps that this launch computes. They differ from `captured_steps` if one captured step serves all
    later ones."""


def cut_into_launches(lowering: LoweringName, program: Program, batch: BatchDescriptor) -> tuple[Launch, ...]:
    """Return the launches of one padded batch of a program, in order.

    `merged` is one graph for all steps, and `eager` calls the body that it would capture. `step` has a graph for draft
    step 0 and one for a later step. `piecewise` has the same launches, each split around attention.
    """
    every = tuple(range(program.num_steps(batch)))
    if program.step_kind == "together" or lowering in ("merged", "eager"):
        return (Launch(batch, every, every),)
    first = Launch(replace(batch, phase="first"), (0,), (0,))
    batch = replace(batch, binding=0)  # later steps read no bound tensors
    if program.step_kind == "distinct":
        return (first, *(Launch(replace(batch, phase="step", step=k), (k,), (k,)) for k in every[1:]))
    later = replace(batch, phase="step", query_len=program.later_rows)
    return (first, *(Launch(later, (1,), (k,)) for k in every[1:]))


@dataclass(frozen=True, slots=True)
class Resolution:
    """The chosen lowering, the reasons against each stronger one, and how prompts run."""

    lowering: LoweringName
    refusals: dict[str, str]
    prefill: PassMode

    @property
    def decode(self) -> PassMode:
        """Return the mode of verify and propose passes."""
        return pass_mode(self.lowering)

    def explain(self) -> str:
        """Return one readable line: the lowering, and the refused ones with their reasons."""
        refused = "; ".join(f"{name} refused: {reason}" for name, reason in self.refusals.items())
        return f"{self.lowering}" + (f" ({refused})" if refused else "")


def refusal(
    lowering: LoweringName, capabilities: Capabilities, host_parameters: tuple[str, ...], collectives: Collectives
) -> str | None:
    """Return why a platform can't run a lowering with an attention backend and a model. None if it can."""
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
    captured = collectives == "anywhere" or (collectives == "in_attention" and lowering != "piecewise")
    if captured and not (support := capabilities.collectives_in_graph):
        return f"ranks run the model together, and the platform can't capture collectives: {support.reason}"
    return None


def resolve(
    decode: LoweringChoice,
    capabilities: Capabilities,
    host_parameters: tuple[str, ...],
    prefill: PrefillChoice = "auto",
    collectives: Collectives = "none",
) -> Resolution:
    """Choose the lowering and the mode of prefill passes. With `auto` it is the strongest possible one.

    Args:
        decode: `auto` chooses no lowering that is stronger than the platform's default.
        prefill: `auto` follows the lowering. One exception: attention with host lengths stays outside the graphs of
            prompts, because it would need an update per layer.
        collectives: the collectives of the model's passes. A platform that can't capture them runs them eagerly.

    Raises:
        UnsupportedError: the named lowering or mode is not possible here. The error has the reason.
    """
    refusals: dict[str, str] = {}
    for lowering in reversed(LOWERINGS) if decode == "auto" else (decode,):
        reason = refusal(lowering, capabilities, host_parameters, collectives)
        default = capabilities.default_lowering
        if reason is None and decode == "auto" and LOWERINGS.index(lowering) > LOWERINGS.index(default):
            reason = f"the platform's default is {default}"
        if reason is None:
            break
        refusals[lowering] = reason
    else:
        raise UnsupportedError(f"decode '{decode}' is not possible here: {'; '.join(refusals.values())}")
    if prefill == "auto":
        decode_mode = pass_mode(lowering)
        return Resolution(lowering, refusals, "piecewise" if decode_mode == "full" and host_parameters else decode_mode)
    mode = "step" if prefill == "full" else prefill
    if (reason := refusal(mode, capabilities, host_parameters, collectives)) is not None:
        raise UnsupportedError(f"prefill '{prefill}' is not possible here: {reason}")
    return Resolution(lowering, refusals, prefill)


def pass_mode(lowering: LoweringName) -> PassMode:
    """Return the pass mode of a lowering."""
    return lowering if lowering == "eager" or lowering == "piecewise" else "full"
