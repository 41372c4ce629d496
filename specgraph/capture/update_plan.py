"""Rewriting the host parameters of a captured graph: strict about what is rewritten, and with what.

The field's usual way zips a list of values with a list of captured ops: a missing, extra or misspelt entry is dropped
without a word and the graph replays with old lengths. Here values are keyed by (draft step, layer, op), and anything
but an exact match is refused before the device is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby

from specgraph.attention import HostLengths, PrepareUpdate, TaskKey
from specgraph.device import Platform, TaskGroup
from specgraph.errors import UpdateError


@dataclass(frozen=True, slots=True)
class _Task:
    group: TaskGroup
    prepare: PrepareUpdate


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """The captured ops of one graph whose lengths are host parameters. Owned by whoever owns the graph."""

    platform: Platform
    num_requests: int
    """Entries that every list of lengths must have: the padded request count of the graph."""
    _tasks: dict[TaskKey, _Task] = field(default_factory=dict[TaskKey, _Task])

    def add(self, key: TaskKey, group: TaskGroup, prepare: PrepareUpdate) -> None:
        """Add one op; attention calls this in a capture.

        Raises:
            UpdateError: `key` was captured before.
        """
        if key in self._tasks:
            raise UpdateError(f"{_name(key)} was captured twice; give each captured op its own step, layer and op name")
        self._tasks[key] = _Task(group, prepare)

    @property
    def keys(self) -> Collection[TaskKey]:
        """Return the captured ops, in capture order."""
        return self._tasks.keys()

    def for_steps(self, lengths: Mapping[int, HostLengths]) -> dict[TaskKey, HostLengths]:
        """Return the lengths of each captured op: the same for every layer of a step.

        Raises:
            UpdateError: as in `check_steps`.
        """
        self.check_steps(lengths)
        given = {step: lengths[step] for step in lengths}
        return {key: given[key.step] for key in self._tasks}

    def apply(self, values: Mapping[TaskKey, HostLengths]) -> None:
        """Rewrite every captured op of this plan once.

        Raises:
            UpdateError: a key is missing or unknown, or a list has the wrong number of entries or a negative one.
                Or an op refuses its values. Nothing was rewritten.
        """
        missing = [key for key in self._tasks if key not in values]
        unknown = [key for key in values if key not in self._tasks]
        if missing or unknown:
            parts = [f"no values for {', '.join(map(_name, missing))}"] if missing else []
            parts += [f"values for {', '.join(map(_name, unknown))}, which the graph does not hold"] if unknown else []
            raise UpdateError(f"update of a captured graph with {len(self._tasks)} ops: {'; '.join(parts)}")
        for key, lengths in values.items():
            self._check(key, lengths)
        ready = [(task.group, task.prepare(values[key])) for key, task in self._tasks.items()]
        with self.platform.batch_task_updates():
            self._issue(ready)

    def check_steps(self, lengths: Mapping[int, HostLengths]) -> None:
        """Check the steps only, not their lengths, which may not be known yet.

        Raises:
            UpdateError: a captured step is missing, or one is given that was not captured.
        """
        known, given = {key.step for key in self._tasks}, set(lengths)
        if known != given:
            raise UpdateError(
                f"lengths are given for steps {sorted(given)}, and the graph holds steps {sorted(known)}: give each "
                "captured step its lengths, and no other"
            )

    def apply_in_order(self, lengths: Mapping[int, HostLengths]) -> None:
        """Rewrite every captured op once, step by step, asking for each step's lengths only when its turn comes.

        For platforms that update while the graph runs: the first steps run while later ones' lengths are on their way.

        Raises:
            UpdateError: as in `check_steps`, before anything was rewritten; or a step's list is malformed, or an op
                refuses it, and the ops of that step and of later ones were not rewritten.
        """
        self.check_steps(lengths)
        for step, keys in groupby(sorted(self._tasks, key=lambda key: key.step), key=lambda key: key.step):
            captured, now = list(keys), lengths[step]
            self._check(captured[0], now)
            self._issue([(self._tasks[key].group, self._tasks[key].prepare(now)) for key in captured])

    def _issue(self, ready: Iterable[tuple[TaskGroup, Callable[[], None]]]) -> None:
        """Rewrite ops whose host arguments have been made and checked."""
        for group, issue in ready:
            with self.platform.task_update(group):
                issue()

    def _check(self, key: TaskKey, lengths: HostLengths) -> None:
        for what, entries in (("query_lens", lengths.query_lens), ("seq_lens", lengths.seq_lens)):
            if len(entries) != self.num_requests:
                raise UpdateError(
                    f"{_name(key)}: {what} has {len(entries)} entries, the graph was captured for {self.num_requests} "
                    "requests; pad with 0"
                )
            if min(entries, default=0) < 0:
                raise UpdateError(f"{_name(key)}: {what} has a negative entry: {entries}")


def _name(key: TaskKey) -> str:
    return f"(step {key.step}, layer {key.layer}, {key.op})"
