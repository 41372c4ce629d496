"""The update plan of a captured graph: it rewrites host parameters, and refuses lengths that don't match the graph.

The usual way is to zip a list of values with a list of captured ops. A missing, extra or misspelt entry is then dropped
silently, and the graph replays with old lengths. Here lengths are keyed by draft step, and any steps other than the
captured ones are refused before the device is touched.
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
    """One captured op with host parameters."""

    key: TaskKey
    group: TaskGroup
    prepare: PrepareUpdate


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """The captured ops of one graph that have host parameters."""

    platform: Platform
    num_requests: int
    """The padded number of requests in the graph. Every list of lengths must have this number of entries."""
    tasks: dict[int, list[Task]] = field(default_factory=dict[int, list[Task]])
    """The ops of each draft step, in capture order."""

    def add(self, key: TaskKey, group: TaskGroup, prepare: PrepareUpdate) -> None:
        """Add one op. Attention calls it during a capture. Raises UpdateError if `key` was added before."""
        ops = self.tasks.setdefault(key.step, [])
        if any(task.key == key for task in ops):
            name = f"(step {key.step}, layer {key.layer}, {key.op})"
            raise UpdateError(f"{name} was captured twice; give each captured op its own step, layer and op name")
        ops.append(Task(key, group, prepare))

    def check_steps(self, lengths: Mapping[int, HostLengths]) -> None:
        """Raise UpdateError unless `lengths` has exactly the captured steps. Only the keys are read, since the lengths
        may not be known yet."""
        if lengths.keys() != self.tasks.keys():
            raise UpdateError(
                f"lengths are given for steps {list(lengths)}, and the graph holds steps {sorted(self.tasks)}: give "
                "each captured step its lengths, and no other"
            )

    def apply(self, lengths: Mapping[int, HostLengths]) -> None:
        """Rewrite every captured op once, all in one batch.

        Raises:
            UpdateError: as in `check_steps`. Or a list has the wrong number of entries or a negative one, or an op
                refuses it. Nothing was rewritten.
        """
        self.check_steps(lengths)
        ready = [update for step in self.tasks for update in self._prepared(step, lengths[step])]
        with self.platform.batch_task_updates():
            self._issue(ready)

    def apply_in_order(self, lengths: Mapping[int, HostLengths]) -> None:
        """Rewrite every captured op once, step by step. The lengths of a step are read only when its turn comes.

        This is for platforms that update while the graph runs: the first steps run while the lengths of later steps are
        still unknown.

        Raises:
            UpdateError: as in `check_steps`, before any op was rewritten. Or a step's list is malformed, or an op
                refuses it: then the ops of this step and of later ones were not rewritten.
        """
        self.check_steps(lengths)
        for step in sorted(self.tasks):
            self._issue(self._prepared(step, lengths[step]))

    def _prepared(self, step: int, lengths: HostLengths) -> list[tuple[TaskGroup, Callable[[], None]]]:
        """Check the new host arguments of a step, and return the task group of each op with the function that issues
        it."""
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
