"""Broken task updates: dropped, incomplete, or not waited for."""

# pyright: reportIncompatibleMethodOverride=false
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from mutants.platform_wrapper import WrappedGraph, WrappedPlatform, install
from mutants.registry import mutant

from specgraph.cpu.tasks import UpdateMode
from specgraph.device import Platform


class _Dropped(Exception):
    """Ends an update block so that the real platform rewrites nothing."""


class Ungating(WrappedPlatform):
    """Knows its task groups, and opens the gates of some of them before each replay."""

    class graph_type(WrappedGraph):
        def replay(self) -> None:
            for group in self.platform.open_groups(self.platform.groups):
                group.is_updated = True
            self.inner.replay()

    def __init__(self, inner: Platform) -> None:
        super().__init__(inner)
        self.groups: list[Any] = []

    @contextmanager
    def task_group(self) -> Iterator[Any]:
        with self.inner.task_group() as group:
            self.groups.append(group)
            yield group


@mutant("update-dropped")
def update_dropped(patch: pytest.MonkeyPatch) -> None:
    """A task update opens the gate and rewrites nothing."""

    class Broken(WrappedPlatform):
        @contextmanager
        def task_update(self, group: Any) -> Iterator[None]:
            try:
                with self.inner.task_update(group):
                    yield
                    raise _Dropped
            except _Dropped:
                group.is_updated = True

    install(patch, Broken)


@mutant("update-missing")
def update_missing(patch: pytest.MonkeyPatch) -> None:
    """Nothing gates the captured tasks: a replay without an update runs with the last lengths."""

    class Broken(Ungating):
        open_groups = staticmethod(lambda groups: groups)

    install(patch, Broken)


@mutant("update-before-previous-replay-ends")
def update_before_previous_replay_ends(patch: pytest.MonkeyPatch) -> None:
    """An update that is issued while the previous replay still runs is overtaken by it and lost."""

    class Overtaken(WrappedGraph):
        def replay(self) -> None:
            self.inner.replay()
            self.platform.is_running = True

    class Broken(WrappedPlatform):
        graph_type = Overtaken
        is_running = False

        def synchronize(self) -> None:
            self.inner.synchronize()
            self.is_running = False

        @contextmanager
        def task_update(self, group: Any) -> Iterator[None]:
            try:
                with self.inner.task_update(group):
                    yield
                    if self.is_running:
                        raise _Dropped
            except _Dropped:
                pass

    install(patch, Broken)


@mutant("one-group-not-gated")
def only_the_first_group_is_gated(patch: pytest.MonkeyPatch) -> None:
    """Only the first group of a graph waits for its update."""

    class Broken(Ungating):
        open_groups = staticmethod(lambda groups: groups[1:])

    install(patch, Broken)


@mutant("one-group-not-gated-last")
def only_the_last_group_is_gated(patch: pytest.MonkeyPatch) -> None:
    """Only the last group of a graph waits for its update."""

    class Broken(Ungating):
        open_groups = staticmethod(lambda groups: groups[:-1])

    install(patch, Broken)


def _commit_some(patch: pytest.MonkeyPatch, chosen: slice) -> None:
    real = UpdateMode.commit

    def commit(self: Any) -> None:
        tasks = self._group.tasks
        kept = [(task, task.args, task.kwargs) for i, task in enumerate(tasks) if i not in range(len(tasks))[chosen]]
        real(self)
        for task, args, kwargs in kept:
            task.args, task.kwargs = args, kwargs
            task.compile()

    patch.setattr(UpdateMode, "commit", commit)


@mutant("group-partly-rewritten")
def only_the_last_op_is_rewritten(patch: pytest.MonkeyPatch) -> None:
    """A task update rewrites the last op of its group only."""
    _commit_some(patch, slice(-1, None))


@mutant("group-partly-rewritten-first")
def only_the_first_op_is_rewritten(patch: pytest.MonkeyPatch) -> None:
    """A task update rewrites the first op of its group only."""
    _commit_some(patch, slice(0, 1))
