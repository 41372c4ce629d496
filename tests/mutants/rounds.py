"""Broken rounds: results that are in flight while the host goes on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from mutants.registry import mutant
from specgraph_run.decoder.request import Running


@mutant("round-copy-overwritten", "specgraph_run.decoder.rounds:Rounds.__init__")
def one_copy(real: Any, self: Any, *args: Any) -> None:
    """The results of all rounds in flight are copied to the same memory."""
    real(self, *args)
    self._copies = [replace(first) for first in self._copies[:1] * len(self._copies)]


@mutant("round-row-reused", "specgraph_run.decoder.rounds:Rounds._read")
def rows_of_now(real: Any, self: Any, unread: Any) -> Any:
    """The tokens of a round go to whoever has the row when they are read."""
    unread.rows = [*self.rows, *[None] * len(unread.rows)][: len(unread.rows)]
    return real(self, unread)


@mutant("round-token-after-stop", "specgraph_run.decoder.rounds:_UnreadRound.forget")
def no_stop(real: Any, self: Any, state: Any) -> None:
    """A request that has ended gets the tokens of the round that was launched before."""


@mutant("round-k-changed-in-flight", "specgraph_run.decoder.rounds:Rounds._read")
def latest_query_len(real: Any, self: Any, unread: Any) -> Any:
    """The tokens of a round are taken apart with the rows per request of the latest one."""
    unread.query_len = self._query_len
    return real(self, unread)


@mutant("round-k-changed-in-flight-dispatch", "specgraph_run.decoder.round_stages:RoundStages.find")
def k_of_the_first_launch(
    real: Any, self: Any, num_requests: int, query_len: int, num_speculative_tokens: int | None = None
) -> Any:
    """The graph of a round is looked up without its K: that of the first launch of the size is taken for all."""
    known = self.__dict__.setdefault("known", {})
    return known.setdefault((num_requests, query_len), real(self, num_requests, query_len, num_speculative_tokens))


@mutant("round-k-changed-in-flight-rows", "specgraph_run.decoder.round_stages:RoundStages.find")
def rows_of_its_own_k(
    real: Any, self: Any, num_requests: int, query_len: int, num_speculative_tokens: int | None = None
) -> Any:
    """A round reads the results of the one before with the rows per request of its own K."""
    own = real(self, num_requests, query_len, num_speculative_tokens).query_len
    return real(self, num_requests, own, num_speculative_tokens)


@mutant("round-k-changed-in-flight-counts", "specgraph_run.decoder.rounds:Rounds._read")
def counted_by_the_latest(real: Any, self: Any, unread: Any) -> Any:
    """Acceptance is counted for the K of the latest launch."""
    if self.adaptive is None:
        return real(self, unread)
    observe, latest = self.adaptive.acceptance.observe, self._query_len - 1
    with pytest.MonkeyPatch.context() as inner:
        inner.setattr(
            self.adaptive.acceptance, "observe", lambda _, counts: observe(latest, [min(c, latest) for c in counts])
        )
        return real(self, unread)


@mutant("cancelled-request-lives-on", "specgraph_run.decoder.rounds:Rounds._vacate")
def row_stays_live(real: Any, self: Any) -> Any:
    """The row of a cancelled request goes on drafting and verifying until somebody takes it."""
    return self._left.clear()


@mutant("stops-of-one-request", "specgraph_run.decoder.request:Running.__post_init__")
def one_stop_token(real: Any, self: Running, length: int, asked: list[frozenset[int]] = []) -> None:  # noqa: B006 (kept)
    """All requests end at the stop tokens of the first one."""
    real(self, length)
    asked.append(frozenset(self.request.stop_token_ids))
    self.stops = asked[0]
