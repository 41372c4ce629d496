"""The capabilities of a device, each with its reason.

The lowering resolver, `specgraph platforms` and the conformance report show why a capability is absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal, get_args

Level = Literal["yes", "no", "quirk"]
LoweringName = Literal["eager", "piecewise", "step", "merged"]

LOWERINGS: tuple[LoweringName, ...] = get_args(LoweringName)
"""The lowerings, from the one with the most launches per propose to the one with a single launch."""


@dataclass(frozen=True, slots=True)
class Support:
    """One capability: present, absent, or present under the conditions that `reason` names (`quirk`).

    `bool()` is True for `yes` and `quirk`.
    """

    level: Level
    reason: str = ""

    def __bool__(self) -> bool:
        return self.level != "no"


def yes(reason: str = "") -> Support:
    """Say that a capability is there."""
    return Support("yes", reason)


def no(reason: str) -> Support:
    """Say that a capability is absent, for `reason`."""
    return Support("no", reason)


def quirk(reason: str) -> Support:
    """Say that a capability is there under the conditions in `reason`."""
    return Support("quirk", reason)


@dataclass(frozen=True, slots=True)
class Rule:
    """One decision of a backend that the device does not force: a default, a limit, a workaround."""

    name: str
    decision: str
    reason: str
    source: str
    """The place where the reason was seen: a public thread, a source file, a measurement."""
    held_by: str
    """The code that enforces it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The capabilities of one opened platform. A claim was tried on this device, or its reason says what it rests on.

    A field with a default needs no claim: it says so if the device lacks it.
    """

    # ---- decide how a drafter runs -------------------------------------------------------------------------------

    graphs: Support
    """Work can be captured into graphs and replayed. Without it everything runs eagerly."""
    merged_loop: Support
    """All K draft steps may be one graph. Without it the `merged` lowering is refused."""
    task_update: Support
    """Host parameters of captured ops can be rewritten between replays; without it, attention with host parameters
    runs eagerly or piecewise."""
    collectives_in_graph: Support
    """Communication ops can be captured. Without it, models that ranks run together run eagerly."""
    float8: Support = field(default_factory=yes)
    """The device copies and converts torch.float8_e4m3fn. Without it FP8 weights and KV caches are refused."""
    update_order: Literal["before_replay", "during_replay"] = "before_replay"
    """The time of task updates: before the replay, or while it runs and waits for them."""
    max_live_graphs: int | None = None
    """The number of captured graphs that may be alive at once. None if no limit is known."""
    default_lowering: LoweringName = "merged"
    """The lowering that `auto` resolves to if nothing refuses it."""
    longest_prefill: int = 512
    """Rows of the largest prefill pass that is captured by default; larger ones are no faster per row."""

    # ---- decide which cases of the suite apply; host engines read them -----------------------------------------

    shared_pool: Support
    """Several graphs can allocate from one pool."""
    fork_in_capture: Support = field(default_factory=yes)
    """A stream that waits for captured work takes part in the capture, and the capture can wait for the stream. No
    drafter or decoder of this project needs it."""
    external_events: Support
    """An event can be recorded or waited for inside a graph, and is visible outside of it."""
    random_in_graph: Support
    """The device generator's random numbers advance from replay to replay as they do in eager."""
    host_read_detection: Support
    """A host read of device memory during capture raises instead of returning a wrong value."""
    order_detection: Support
    """Unordered access to the same memory from two streams is reported."""

    # ---- for people ----------------------------------------------------------------------------------------------

    notes: Mapping[str, Support] = field(default_factory=dict[str, Support])
    """Further facts by name. Reports print them; the core decides nothing by them."""
    rules: tuple[Rule, ...] = ()
    """The backend's policy, printed by `specgraph explain`."""

    def supports(self) -> dict[str, Support]:
        """Return every capability by name: the fields in order of declaration, then the notes."""
        own = {f.name: v for f in fields(self) if isinstance(v := getattr(self, f.name), Support)}
        return own | dict(self.notes)
