"""K that follows acceptance (`-k auto`): which of the captured K gives the most tokens per second now.

A round of K draft tokens takes a time that depends on the batch size, and gives 1 + a_1 + a_1 a_2 + ... tokens per
request, where a_i is the chance that draft token i is accepted when all before it are. Times are measured once, after
the capture; the chances are followed while requests run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from operator import mul

from specgraph.capture import padded_size
from specgraph.errors import ConfigError
from specgraph_run.decoder.metrics import at_least
from specgraph_run.options import RoundTimes

HALF_LIFE = 256
"""Verified drafts (one per request and round) after which an observation counts half."""

_WEIGHT = 4.0
"""The assumption about a place before it was seen counts as much as this many drafts."""

_FIRST = 0.7
"""The rate of the first place before any draft was seen."""


class AcceptanceRates:
    """The chance, for each place of a draft, that its token is accepted when all before it are, followed exponentially.

    A place that no recent draft reached is assumed to be like the one before it, so that a longer K is tried again
    when acceptance rises.
    """

    def __init__(self, num_speculative_tokens: int) -> None:
        """num_speculative_tokens: places, the largest K."""
        self._reached = [0.0] * num_speculative_tokens
        self._accepted = [0.0] * num_speculative_tokens

    def observe(self, num_speculative_tokens: int, accepted: Sequence[int]) -> None:
        """Count one round of K drafts, in which each request had so many of them accepted."""
        kept = 0.5 ** (len(accepted) / HALF_LIFE)
        reached = at_least(accepted, num_speculative_tokens)
        for place in range(len(self._reached)):
            seen = place < num_speculative_tokens
            self._reached[place] = kept * self._reached[place] + (reached[place] if seen else 0)
            self._accepted[place] = kept * self._accepted[place] + (reached[place + 1] if seen else 0)

    @property
    def rates(self) -> list[float]:
        """a_1 to a_K."""
        rates: list[float] = []
        for reached, accepted in zip(self._reached, self._accepted, strict=True):
            before = rates[-1] if rates else _FIRST
            rates.append((accepted + _WEIGHT * before) / (reached + _WEIGHT))
        return rates

    def tokens(self, num_speculative_tokens: int) -> float:
        """Return a request's expected tokens per round of this K, the target's own included."""
        return expected_tokens(self.rates, num_speculative_tokens)


def expected_tokens(rates: Sequence[float], num_speculative_tokens: int) -> float:
    """Return a request's tokens per round of K drafts, the target's own included: 1 + a_1 + a_1 a_2 + ..."""
    return 1 + sum(accumulate(rates[:num_speculative_tokens], mul))


def best_k(tokens: Callable[[int], float], times: Mapping[int, float]) -> int:
    """Return the K of `times` (microseconds of a round) with the most `tokens` (expected per round) per second; the
    smallest of equals.
    """
    return min(times, key=lambda k: (-tokens(k) / times[k], k))


class AdaptiveK:
    """Chooses K for each propose of one decoder, with `rounds_ahead` before the round in flight was read. The choice
    follows from times and observed counts."""

    def __init__(self, times: RoundTimes, acceptance: AcceptanceRates) -> None:
        """
        Args:
            times: for every captured size and K.
            acceptance: what is known of drafts so far.
        """
        self.times, self._sizes, self.acceptance = times, sorted(times), acceptance

    def choose(self, num_requests: int) -> int:
        """Return K for a batch: by the times of the captured size that holds it, or of the largest where none does."""
        size = padded_size(num_requests, self._sizes) or self._sizes[-1]
        return best_k(self.acceptance.tokens, self.times[size])


def check_times(times: RoundTimes, sizes: Sequence[int], candidates: Sequence[int] | None) -> None:
    """Raise ConfigError for the first captured size and K that a table has no time for, or where K is fixed."""
    if candidates is None:
        raise ConfigError("round_times choose among k_candidates, and there are none: K is fixed")
    for size in sizes:
        for k in candidates:
            if times.get(size, {}).get(k) is None:
                raise ConfigError(
                    f"round_times has no time for {size} requests and K {k}: give "
                    f"microseconds for the sizes {', '.join(map(str, sizes))} and K {', '.join(map(str, candidates))}"
                )
