"""Broken rounds: results that are in flight while the host goes on."""

from __future__ import annotations

from typing import Any

import pytest
from mutants.registry import mutant

from specgraph.engine.request import Running
from specgraph.engine.round_steps import RoundSteps
from specgraph.engine.rounds import Rounds, _UnreadRound


@mutant("round-copy-overwritten", "engine")
def one_copy(patch: pytest.MonkeyPatch) -> None:
    """The results of all rounds in flight are copied to the same memory."""
    real = Rounds.__init__

    def init(self: Any, *args: Any) -> None:
        real(self, *args)
        self._free = self._free[:1] * len(self._free)

    patch.setattr(Rounds, "__init__", init)


@mutant("round-row-reused", "engine")
def rows_of_now(patch: pytest.MonkeyPatch) -> None:
    """The tokens of a round go to whoever has the row when they are read."""
    real = Rounds._read

    def read(self: Any, unread: Any) -> Any:
        unread.rows = [*self.rows, *[None] * len(unread.rows)][: len(unread.rows)]
        return real(self, unread)

    patch.setattr(Rounds, "_read", read)


@mutant("round-token-after-stop", "engine")
def remembered(patch: pytest.MonkeyPatch) -> None:
    """A request that has ended gets the tokens of the round that was launched before."""
    patch.setattr(_UnreadRound, "forget", lambda self, state: None)


@mutant("round-k-changed-in-flight", "engine")
def latest_query_len(patch: pytest.MonkeyPatch) -> None:
    """The tokens of a round are taken apart with the rows per request of the latest one."""
    real = Rounds._read

    def read(self: Any, unread: Any) -> Any:
        unread.query_len = self._query_len
        return real(self, unread)

    patch.setattr(Rounds, "_read", read)


@mutant("round-k-changed-in-flight-dispatch", "engine", hazard="round-k-changed-in-flight")
def k_of_the_first_launch(patch: pytest.MonkeyPatch) -> None:
    """The graph of a round is looked up without its K: that of the first launch of the size is taken for all."""
    real = RoundSteps.find

    def find(self: Any, num_requests: int, query_len: int, num_speculative_tokens: int | None = None) -> Any:
        known = self.__dict__.setdefault("known", {})
        return known.setdefault((num_requests, query_len), real(self, num_requests, query_len, num_speculative_tokens))

    patch.setattr(RoundSteps, "find", find)


@mutant("round-k-changed-in-flight-rows", "engine", hazard="round-k-changed-in-flight")
def rows_of_its_own_k(patch: pytest.MonkeyPatch) -> None:
    """A round reads the results of the one before with the rows per request of its own K."""
    real = RoundSteps.find

    def find(self: Any, num_requests: int, query_len: int, num_speculative_tokens: int | None = None) -> Any:
        own = real(self, num_requests, query_len, num_speculative_tokens).query_len
        return real(self, num_requests, own, num_speculative_tokens)

    patch.setattr(RoundSteps, "find", find)


@mutant("round-k-changed-in-flight-counts", "engine", hazard="round-k-changed-in-flight")
def counted_by_the_latest(patch: pytest.MonkeyPatch) -> None:
    """Acceptance is counted for the K of the latest launch."""
    real = Rounds._read

    def read(self: Any, unread: Any) -> Any:
        if self.adaptive is None:
            return real(self, unread)
        observe, latest = self.adaptive.rates.observe, self._query_len - 1
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(
                self.adaptive.rates, "observe", lambda _, counts: observe(latest, [min(c, latest) for c in counts])
            )
            return real(self, unread)

    patch.setattr(Rounds, "_read", read)


@mutant("cancelled-request-lives-on", "engine")
def row_stays_live(patch: pytest.MonkeyPatch) -> None:
    """The row of a cancelled request goes on drafting and verifying until somebody takes it."""
    patch.setattr(Rounds, "_vacate", lambda self: self._left.clear())


@mutant("stops-of-one-request", "engine")
def one_stop_token(patch: pytest.MonkeyPatch) -> None:
    """All requests end at the stop tokens of the first one."""
    asked: list[frozenset[int]] = []

    def first(self: Running) -> None:
        asked.append(frozenset(self.request.stop_token_ids))
        self.stops = asked[0]

    patch.setattr(Running, "__post_init__", first)
