"""K that follows acceptance (`-k auto`): the captured K that gives the most tokens per second at the moment.

A round of K draft tokens takes a time that depends on the batch size. It gives each request 1 + a_1 + a_1 a_2 + ...
tokens: a_i is the chance that draft token i is accepted if all before it are. Times are measured once, after the
capture. The chances are estimated anew while requests run.
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
"""The number of verified drafts (one per request and round) after which an observation counts half."""

_WEIGHT = 4.0
"""A place's assumed rate, before its first draft, weighs as much as this many observed drafts."""

_FIRST = 0.7
"""The assumed rate of the first place."""


class AcceptanceRates:
    """An exponential moving average, per place of a draft, of the chance that its token is accepted if all before are.

    A place that no recent draft reached is assumed to have the rate of the place before it. So a longer K is tried
    again when acceptance rises.
    """

    def __init__(self, num_speculative_tokens: int) -> None:
        """num_speculative_tokens: the number of places, the largest K."""
        self._reached = [0.0] * num_speculative_tokens
        self._accepted = [0.0] * num_speculative_tokens

    def observe(self, num_speculative_tokens: int, accepted: Sequence[int]) -> None:
        """Count one round of K drafts; `accepted` has the number of accepted draft tokens of each request."""
        kept = 0.5 ** (len(accepted) / HALF_LIFE)
        reached = at_least(accepted, num_speculative_tokens)
        for place in range(len(self._reached)):
            seen = place < num_speculative_tokens
            self._reached[place] = kept * self._reached[place] + (reached[place] if seen else 0)
            self._accepted[place] = kept * self._accepted[place] + (reached[place + 1] if seen else 0)

    @property
    def rates(self) -> list[float]:
        """The estimated a_1 to a_K."""
        rates: list[float] = []
        for reached, accepted in zip(self._reached, self._accepted, strict=True):
            before = rates[-1] if rates else _FIRST
            rates.append((accepted + _WEIGHT * before) / (reached + _WEIGHT))
        return rates

    def tokens(self, num_speculative_tokens: int) -> float:
        """Return a request's expected tokens per round of this K. The target's own token counts."""
        return expected_tokens(self.rates, num_speculative_tokens)


def expected_tokens(rates: Sequence[float], num_speculative_tokens: int) -> float:
    """Return a request's expected tokens per round of K drafts: 1 + a_1 + a_1 a_2 + ... The 1 is the target's own."""
    return 1 + sum(accumulate(rates[:num_speculative_tokens], mul))


def best_k(tokens: Callable[[int], float], times: Mapping[int, float]) -> int:
    """Return the K that gives the most tokens per second, the smallest if several do.

    Args:
        tokens: expected tokens per round of a K.
        times: microseconds of a round by K.
    """
    return min(times, key=lambda k: (-tokens(k) / times[k], k))


class AdaptiveK:
    """Chooses K for each propose of one decoder, from measured times and the acceptance observed so far.

    With `rounds_ahead` the round in flight is not among the observed ones.
    """

    def __init__(self, times: RoundTimes, acceptance: AcceptanceRates) -> None:
        """
        Args:
            times: microseconds of a round for every captured size and K.
            acceptance: the estimated rates; the decoder updates them.
        """
        self.times, self._sizes, self.acceptance = times, sorted(times), acceptance

    def choose(self, num_requests: int) -> int:
        """Return K for a batch. Its captured size decides; a batch larger than all sizes uses the largest."""
        size = padded_size(num_requests, self._sizes) or self._sizes[-1]
        return best_k(self.acceptance.tokens, self.times[size])


def check_times(times: RoundTimes, sizes: Sequence[int], candidates: Sequence[int] | None) -> None:
    """Raise ConfigError if K is fixed, or if the table lacks a captured size or a K; the text names the first."""
    if candidates is None:
        raise ConfigError("round_times choose among k_candidates, and there are none: K is fixed")
    for size in sizes:
        for k in candidates:
            if times.get(size, {}).get(k) is None:
                raise ConfigError(
                    f"round_times has no time for {size} requests and K {k}: give "
                    f"microseconds for the sizes {', '.join(map(str, sizes))} and K {', '.join(map(str, candidates))}"
                )
