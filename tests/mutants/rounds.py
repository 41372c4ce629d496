"""Broken rounds of the lowering `round`: what is in flight while the host goes on."""

from __future__ import annotations

from typing import Any

import pytest
from mutants.draft_ops import replace_op
from mutants.registry import mutant

from specgraph.decoding.device_rounds import DeviceRounds


@mutant("round-copy-overwritten", "engine")
def one_copy(patch: pytest.MonkeyPatch) -> None:
    """All rounds in flight are copied to one place on the host."""
    real = DeviceRounds.__init__

    def init(self: Any, *args: Any) -> None:
        real(self, *args)
        self._free = self._free[:1] * len(self._free)

    patch.setattr(DeviceRounds, "__init__", init)


@mutant("round-row-reused", "engine")
def rows_of_now(patch: pytest.MonkeyPatch) -> None:
    """The tokens of a round go to whoever has the row when they are read."""
    real = DeviceRounds._read

    def read(self: Any, unread: Any) -> Any:
        now = [*self.rows, *[None] * len(unread.rows)]
        unread.rows = now[: len(unread.rows)]
        return real(self, unread)

    patch.setattr(DeviceRounds, "_read", read)


@mutant("round-token-after-stop", "kernel")
def no_stop(patch: pytest.MonkeyPatch) -> None:
    """The device does not look for stop tokens and limits."""
    replace_op(patch, "stop_finished", lambda real, *args: None)


@mutant("round-token-after-stop-length", "kernel", hazard="round-token-after-stop")
def stop_tokens_only(patch: pytest.MonkeyPatch) -> None:
    """The device looks for stop tokens and not for limits."""

    def broken(real: Any, sampled: Any, counts: Any, remaining: Any, stops: Any) -> None:
        real(sampled, counts, remaining + 1000, stops)

    replace_op(patch, "stop_finished", broken)


@mutant("round-block-freed-in-flight", "engine")
def free_at_once(patch: pytest.MonkeyPatch) -> None:
    """A cancelled request's blocks are free at once."""
    real = DeviceRounds.leave
    patch.setattr(DeviceRounds, "leave", lambda self, state, finished: real(self, state, finished=True))


@mutant("round-k-changed-in-flight", "engine")
def latest_query_len(patch: pytest.MonkeyPatch) -> None:
    """The tokens of a round are taken apart with the rows per request of the latest one."""
    real = DeviceRounds._read

    def read(self: Any, unread: Any) -> Any:
        unread.query_len = self._query_len
        return real(self, unread)

    patch.setattr(DeviceRounds, "_read", read)
