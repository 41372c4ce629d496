"""Acceptance of drafts, as vLLM defines it.

A draft is one request's K tokens in one round.
mean acceptance length = 1 + accepted tokens / drafts (the target's own token counts);
acceptance at position i = drafts with an accepted token i / drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated

from specgraph.errors import ConfigError
from specgraph.validation import MOST_POSITIONS, Range, check, checked_fields, shown


def at_least(accepted: Sequence[int], num_speculative_tokens: int) -> list[int]:
    """Return, for i = 0 to K, the number of requests that accepted i draft tokens or more."""
    exactly = map(accepted.count, range(num_speculative_tokens, -1, -1))
    return [*accumulate(exactly)][::-1]


@checked_fields
@dataclass(slots=True)
class AcceptanceMetrics:
    """Counts over all requests and rounds."""

    num_speculative_tokens: Annotated[int, Range(0, MOST_POSITIONS)]
    """The largest K; 0 without a drafter."""
    num_drafts: Annotated[int, Range(0)] = 0
    """Verified drafts: one per request and round."""
    accepted: list[int] = field(default_factory=list[int])
    """For each position 0..K-1, the number of drafts with an accepted token there."""
    drafts_by_k: dict[int, int] = field(default_factory=dict[int, int])
    """The number of verified drafts by K (for a tree, its depth)."""
    rounds: Annotated[int, Range(0)] = 0
    """Verifies over the batch; prefills don't count."""
    rows_without_block: Annotated[int, Range(0)] = 0
    """`Drafter.rows_without_block`, summed over the proposes before the last round that was read. A decoder gives each
    request all blocks that it needs, so this is 0."""

    def __post_init__(self) -> None:
        if not self.accepted:
            self.accepted = [0] * self.num_speculative_tokens

    def observe(self, accepted: Sequence[int], num_speculative_tokens: int) -> None:
        """Count the verified drafts of one round of K (for a tree, its depth); `accepted` has a number per request.

        Raises:
            ConfigError: K is above the largest one, or a request accepted fewer than 0 or more than K tokens.
        """
        if type(accepted) is not list or type(num_speculative_tokens) is not int:
            accepted = check("accepted", accepted, Sequence[int])
            num_speculative_tokens = check("num_speculative_tokens", num_speculative_tokens, int)
        if not 0 <= num_speculative_tokens <= len(self.accepted):
            raise ConfigError(
                f"num_speculative_tokens is {shown(num_speculative_tokens)}: it is 0 to {len(self.accepted)} here"
            )
        reached = at_least(accepted, num_speculative_tokens)
        if reached[0] != len(accepted):
            raise ConfigError(
                f"accepted holds another number than 0 to {num_speculative_tokens}, the drafts of a request"
            )
        self.num_drafts += len(accepted)
        self.drafts_by_k[num_speculative_tokens] = self.drafts_by_k.get(num_speculative_tokens, 0) + len(accepted)
        for position, count in enumerate(reached[1:]):
            self.accepted[position] += count

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per request and verify, the target's own included. 1.0 before the first draft."""
        return 1 + sum(self.accepted) / max(self.num_drafts, 1)

    @property
    def acceptance_per_position(self) -> list[float]:
        """For each i, the share of drafts with an accepted i-th token."""
        return [count / max(self.num_drafts, 1) for count in self.accepted]
