"""The steps of a round: propose for what the target sampled last, hand the drafts over, verify and accept them.

Between two rounds a request's state is on the device: the tokens that the target sampled, their count, the position
they begin at, and hidden states. A round begins with the propose, so that a new request needs no pass of its own: after
its prefill it is a request that sampled one token (`ProposeBatch.join`). For the same reason a host that has read the
round before knows all lengths of a round before its launch.

The lowering says where the list is cut: `round` captures all of it in one graph (`round_program.py`), the others have
graphs of the propose and of the verify.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from specgraph.capture import Pass, padded_size
from specgraph.draft import Drafter, ProposeBatch
from specgraph.engine.round_program import HandOver, HostState, RoundRunner
from specgraph.engine.target import TargetRunner


@dataclass(frozen=True, slots=True)
class Round:
    """A round over a padded batch."""

    query_len: int
    """Rows per request of its result: K + 1."""
    steps: tuple[Callable[[HostState | None], None], ...]
    """Its steps in order; None for attention with device lengths."""


class RoundSteps:
    """The rounds of one decoder, worked out once for each shape of batch."""

    def __init__(
        self, target: TargetRunner, drafter: Drafter | None, whole: RoundRunner | None, query_len: int
    ) -> None:
        """
        Args:
            drafter: None where the target decodes alone.
            whole: runs a round as one graph; None in every lowering but `round`.
            query_len: rows per request of the first round's result; without a drafter, of every round's.
        """
        self.target, self.drafter, self.query_len = target, drafter, query_len
        self._whole, self._config = whole, target.config
        self._found: dict[tuple[int, int, int | None], Round] = {}

    def find(self, num_requests: int, query_len: int, num_speculative_tokens: int | None = None) -> Round:
        """The round over the first `num_requests` rows of the round's memory.

        Args:
            query_len: rows per request in the round before.
            num_speculative_tokens: K, one of `EngineConfig.k_candidates`; by default the config chooses.
        """
        key = num_requests, query_len, num_speculative_tokens
        if (known := self._found.get(key)) is None:
            known = self._found[key] = self._make(num_requests, query_len, num_speculative_tokens)
        return known

    def _make(self, num_requests: int, query_len: int, asked: int | None) -> Round:
        n, config = padded_size(num_requests, self._config.sizes) or num_requests, self._config
        k, tree = (self.query_len - 1, False) if self.drafter is None else config.shape(n)
        k = k if asked is None else asked
        if self._whole is not None:
            return Round(k + 1, (partial(self._whole.launch, self._whole.dispatch(num_requests, query_len, k, tree)),))
        verify = next(program for program in self.target.verify_programs if program.of_trees == tree)
        ready = self.target.dispatch(verify, num_requests, k + 1)
        if self.drafter is None:
            hand_over = HandOver(verify, None, n, query_len, k)
            return Round(k + 1, (hand_over, partial(_verify, self.target, ready)))
        draft = next(program for program in self.drafter.draft_programs if program.draws_trees == tree)
        propose = partial(_propose, self.drafter, self.drafter.inputs(num_requests, query_len), asked)
        return Round(k + 1, (propose, HandOver(verify, draft, n, query_len, k), partial(_verify, self.target, ready)))


def _propose(drafter: Drafter, batch: ProposeBatch, num_speculative_tokens: int | None, host: HostState | None) -> None:
    starts, counts = (None, None) if host is None else host
    drafter.propose(
        batch,
        host_start_positions=starts,
        host_num_sampled=counts,
        copy=False,
        num_speculative_tokens=num_speculative_tokens,
    )


def _verify(target: TargetRunner, ready: Pass, host: HostState | None) -> None:
    target.verify(ready, () if host is None else host.next_positions)
