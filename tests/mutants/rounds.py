"""Broken rounds of the lowering `round`: what is in flight while the host goes on."""

from __future__ import annotations

from typing import Any

import pytest
from mutants.draft_ops import replace_op
from mutants.registry import mutant

from specgraph.engine.device_rounds import DeviceRounds
from specgraph.engine.round_outputs import RoundOutputs
from specgraph.engine.round_program import RoundRunner
from specgraph.engine.steady_rounds import SteadyRounds


@mutant("round-copy-overwritten", "engine")
def one_slot(patch: pytest.MonkeyPatch) -> None:
    """The ring has slots for the rounds of one launch, whatever is in flight."""
    real = RoundOutputs.__init__

    def init(self: Any, platform: Any, memory: Any, num_in_flight: int) -> None:
        real(self, platform, memory, num_in_flight)
        self.num_slots = 1
        self.ring = self.ring[: self.num_slots]

    patch.setattr(RoundOutputs, "__init__", init)


@mutant("round-copy-overwritten-first-token", "engine", hazard="round-copy-overwritten")
def one_first_token(patch: pytest.MonkeyPatch) -> None:
    """The first tokens of requests that joined have one place per row, whatever is in flight."""
    real = RoundOutputs.__init__

    def init(self: Any, *args: Any) -> None:
        real(self, *args)
        self.first_token_ids = self.first_token_ids[:1]

    patch.setattr(RoundOutputs, "__init__", init)


@mutant("round-row-reused", "engine")
def rows_of_now(patch: pytest.MonkeyPatch) -> None:
    """The tokens of a round go to whoever has the row when they are read."""
    real = DeviceRounds._receive

    def receive(self: Any) -> None:
        launch = self._unread[0]
        launch.rows = [*self.rows, *[None] * len(launch.rows)][: len(launch.rows)]
        real(self)

    patch.setattr(DeviceRounds, "_receive", receive)


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
    real = DeviceRounds._receive

    def receive(self: Any) -> None:
        self._unread[0].query_len = self._query_len
        real(self)

    patch.setattr(DeviceRounds, "_receive", receive)


@mutant("round-k-changed-in-flight-dispatch", "engine", hazard="round-k-changed-in-flight")
def k_of_the_first_launch(patch: pytest.MonkeyPatch) -> None:
    """The graph of a round is looked up without its K: that of the first launch of the size is taken for all."""
    real = RoundRunner.dispatch

    def dispatch(self: Any, num_rows: int, query_len: int, num_speculative_tokens: int | None = None) -> Any:
        known = self.__dict__.setdefault("known", {})
        return known.setdefault((num_rows, query_len), real(self, num_rows, query_len, num_speculative_tokens))

    patch.setattr(RoundRunner, "dispatch", dispatch)


@mutant("round-k-changed-in-flight-rows", "engine", hazard="round-k-changed-in-flight")
def rows_of_its_own_k(patch: pytest.MonkeyPatch) -> None:
    """A round reads the results of the one before with the rows per request of its own K."""
    real = RoundRunner.dispatch

    def dispatch(self: Any, num_rows: int, query_len: int, num_speculative_tokens: int | None = None) -> Any:
        found = real(self, num_rows, query_len, num_speculative_tokens)
        return real(self, num_rows, found.batch.num_speculative_tokens + 1, num_speculative_tokens)

    patch.setattr(RoundRunner, "dispatch", dispatch)


@mutant("round-k-changed-in-flight-counts", "engine", hazard="round-k-changed-in-flight")
def counted_by_the_latest(patch: pytest.MonkeyPatch) -> None:
    """Acceptance is counted for the K of the latest launch."""
    real = DeviceRounds._hand_out

    def hand_out(self: Any, read: Any) -> Any:
        if self.adaptive is not None:
            observe = self.adaptive.rates.observe
            with pytest.MonkeyPatch.context() as inner:
                latest = self._query_len - 1
                inner.setattr(
                    self.adaptive.rates, "observe", lambda _, counts: observe(latest, [min(c, latest) for c in counts])
                )
                return real(self, read)
        return real(self, read)

    patch.setattr(DeviceRounds, "_hand_out", hand_out)


@mutant("cancelled-request-lives-on", "engine")
def row_stays_live(patch: pytest.MonkeyPatch) -> None:
    """The row of a cancelled request goes on drafting and verifying until somebody takes it."""
    patch.setattr(DeviceRounds, "_vacate", lambda self: self._left.clear())


@mutant("stops-of-one-request", "engine")
def one_stop_token(patch: pytest.MonkeyPatch) -> None:
    """Rounds that are handed out whole are looked through for one stop token of the batch."""
    real = SteadyRounds._begin

    def begin(self: Any, rows: Any, query_len: int) -> None:
        real(self, rows, query_len)
        self._stops = self._stops[:1]

    patch.setattr(SteadyRounds, "_begin", begin)
