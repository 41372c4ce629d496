"""Rewriting the host parameters of a captured graph: strict about what is rewritten, and with what.

The field's usual way zips a list of values with a list of captured ops: a missing, extra or misspelt entry is dropped
without a word and the graph replays with old lengths. Here lengths are keyed by draft step, and anything but the
captured steps is refused before the device is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from specgraph.attention import HostLengths, TaskKey
from specgraph.attention.interface import PrepareUpdate
from specgraph.device import Platform, TaskGroup
from specgraph.errors import UpdateError


class Task(NamedTuple):
    """One captured op whose lengths are host parameters."""

    key: TaskKey
    group: TaskGroup
    prepare: PrepareUpdate


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """The captured ops of one graph whose lengths are host parameters. Owned by whoever owns the graph."""

    platform: Platform
    num_requests: int
    """Entries that every list of lengths must have: the padded request count of the graph."""
    tasks: dict[int, list[Task]] = field(default_factory=dict[int, list[Task]])
    """The ops of each step, in capture order."""

    def add(self, key: TaskKey, group: TaskGroup, prepare: PrepareUpdate) -> None:
        """Add one op, for attention in a capture; a `key` that was captured before is an UpdateError."""
        ops = self.tasks.setdefault(key.step, [])
        if any(task.key == key for task in ops):
            name = f"(step {key.step}, layer {key.layer}, {key.op})"
            raise UpdateError(f"{name} was captured twice; give each captured op its own step, layer and op name")
        ops.append(Task(key, group, prepare))

    def check_steps(self, lengths: Mapping[int, HostLengths]) -> None:
        """Raise UpdateError unless these are the captured steps; their lengths may not be known yet."""
        if lengths.keys() != self.tasks.keys():
            raise UpdateError(
                f"lengths are given for steps {list(lengths)}, and the graph holds steps {sorted(self.tasks)}: give "
                "each captured step its lengths, and no other"
            )

    def apply(self, lengths: Mapping[int, HostLengths]) -> None:
        """Rewrite every captured op once, all in one batch.

        Raises:
            UpdateError: as in `check_steps`; or a list has the wrong number of entries or a negative one, or an op
                refuses it. Nothing was rewritten.
        """
        self.check_steps(lengths)
        ready = [update for step in self.tasks for update in self._prepared(step, lengths[step])]
        with self.platform.batch_task_updates():
            self._issue(ready)

    def apply_in_order(self, lengths: Mapping[int, HostLengths]) -> None:
        """Rewrite every captured op once, step by step, asking for each step's lengths only when its turn comes.

        For platforms that update while the graph runs: the first steps run while later ones' lengths are on their way.

        Raises:
            UpdateError: as in `check_steps`, before anything was rewritten; or a step's list is malformed, or an op
                refuses it, and the ops of that step and of later ones were not rewritten.
        """
        self.check_steps(lengths)
        for step in sorted(self.tasks):
            self._issue(self._prepared(step, lengths[step]))

    def _prepared(self, step: int, lengths: HostLengths) -> list[tuple[TaskGroup, Callable[[], None]]]:
        """Return the ops of a step with their new host arguments, made and checked."""
        for name, entries in lengths._asdict().items():
            if len(entries) != self.num_requests:
                raise UpdateError(
                    f"step {step}: {name} has {len(entries)} entries, the graph was captured for {self.num_requests} "
                    "requests; pad with 0"
                )
            if min(entries, default=0) < 0:
                raise UpdateError(f"step {step}: {name} has a negative entry: {entries}")
        return [(task.group, task.prepare(lengths)) for task in self.tasks[step]]

    def _issue(self, ready: Sequence[tuple[TaskGroup, Callable[[], None]]]) -> None:
        for group, issue in ready:
            with self.platform.task_update(group):
                issue()
