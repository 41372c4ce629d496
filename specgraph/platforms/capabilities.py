"""What a device can do, each answer with its reason.

An absent capability is an answer, not an omission: the lowering resolver, `specgraph platforms` and the
conformance report all show the reason.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args

Level = Literal["yes", "no", "quirk"]
LoweringName = Literal["eager", "piecewise", "step", "merged"]
UpdateOrder = Literal["before_replay", "during_replay"]

LOWERINGS: tuple[LoweringName, ...] = get_args(LoweringName)
"""From the weakest (most launches) to the strongest (one launch a propose)."""


@dataclass(frozen=True, slots=True)
class Support:
    """One capability. `quirk` works, but only under the conditions that `reason` names.

    Truthiness: `yes` and `quirk` are true.
    """

    level: Level
    reason: str = ""

    def __bool__(self) -> bool:
        return self.level != "no"


def yes(reason: str = "") -> Support:
    """The capability is there."""
    return Support("yes", reason)


def no(reason: str) -> Support:
    """The capability is absent, for `reason`."""
    return Support("no", reason)


def quirk(reason: str) -> Support:
    """The capability is there under the conditions in `reason`."""
    return Support("quirk", reason)


@dataclass(frozen=True, slots=True)
class Rule:
    """One decision of a backend that the device itself would not force: a default, a limit, a detour."""

    name: str
    decision: str
    reason: str
    source: str
    """Where the reason was seen: a public thread, a source file, a measurement."""
    held_by: str
    """The code that enforces it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What one opened platform offers. Claim only what a probe has shown on the device at hand."""

    graphs: Support
    """Work can be captured into graphs and replayed."""
    shared_pool: Support
    """Several graphs can allocate from one pool (captured largest first)."""
    external_events: Support
    """Events recorded or waited for inside a graph, visible outside of it."""
    task_update: Support
    """Host parameters of captured tasks can be rewritten between replays."""
    merged_loop: Support
    """The whole K-step draft loop may be one graph."""
    collectives_in_graph: Support
    """Communication ops can be captured."""
    conditional_nodes: Support
    """IF/WHILE nodes inside a graph."""
    random_in_graph: Support
    """The device generator's random numbers advance from replay to replay as they do in eager."""
    host_read_detection: Support
    """A host read of device memory in capture is refused, not answered wrongly."""
    order_detection: Support
    """Unordered access to the same memory from two streams is reported."""
    triton: Support
    """Triton kernels run on this device."""
    max_live_graphs: int | None = None
    """How many instantiated graphs may live at once; None when no limit is known."""
    update_order: UpdateOrder = "before_replay"
    """Whether task updates are issued before the replay or while it runs (gated by external events)."""
    default_lowering: LoweringName = "merged"
    """What `auto` resolves to when nothing refuses it."""
    rules: tuple[Rule, ...] = ()
    """The backend's policy, for `specgraph explain`."""

    def supports(self) -> dict[str, Support]:
        """All yes/no/quirk capabilities by name, in declaration order."""
        return {f.name: v for f in fields(self) if isinstance(v := getattr(self, f.name), Support)}
