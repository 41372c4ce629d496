"""The limits and choices of a decoder: those of its drafter, and those that only a whole engine has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from specgraph.draft import DraftConfig
from specgraph.draft.config import DraftShape
from specgraph.engine.adaptive_k import check_times
from specgraph.errors import ConfigError
from specgraph.options import DecoderOptions
from specgraph.validation import checked_fields


@checked_fields
@dataclass(frozen=True, kw_only=True)
class EngineConfig(DraftConfig, DecoderOptions):
    """Limits and choices of a target with its drafter. Without num_blocks there are enough for the largest batch.

    Raises:
        ConfigError: a number is out of range, or an option has no such value.
    """

    def __post_init__(self) -> None:
        DraftConfig.__post_init__(self)
        for name in ("sampling_parameters", "logprobs"):
            if getattr(self, name) and self.synthetic_acceptance is not None:
                raise ConfigError(
                    f"{name} is about the target's tokens, and with synthetic_acceptance the output is not the "
                    f"target's: leave out one of the two"
                )
        if self.verified_drafts == "auto" and self.k_candidates is None:
            raise ConfigError(
                "verified_drafts 'auto' chooses among k_candidates, and there are none: give them, or the number of "
                "drafts that a verify takes per request"
            )
        if self.round_times is not None:
            check_times(self.round_times, self.sizes, self.k_candidates)
        if self.synthetic_acceptance is not None:
            acceptance_chances(self.synthetic_acceptance, self.num_speculative_tokens)

    @property
    def shapes(self) -> frozenset[DraftShape]:
        """See `DraftConfig.shapes`: where verified_drafts is "auto", every propose drafts the largest K."""
        if self.verified_drafts == "auto":
            return frozenset([DraftShape(self.num_speculative_tokens)])
        return super().shapes

    def drafted(self, candidate: int) -> int:
        """Return the K of a propose for one of k_candidates: the same, or the largest where verified_drafts is
        "auto"."""
        return self.num_speculative_tokens if self.verified_drafts == "auto" else candidate

    def verified(self, num_requests: int, num_drafts: int, candidate: int | None) -> int:
        """Return the drafts that a verify of a padded batch takes, for a `candidate` of k_candidates (None: as many as
        for any); 0 where verifies take all `num_drafts`, as `BatchDescriptor.verified`.
        """
        average = self.verified_drafts
        if average is None:
            return 0
        if average == "auto":
            average = self.num_speculative_tokens if candidate is None else candidate
        return min(num_drafts, max(1, int(num_requests * average)))


def acceptance_chances(synthetic: float | Sequence[float], num_speculative_tokens: int) -> tuple[float, ...]:
    """Return, for each position, the chance that its token is accepted when all before it are, by an
    `EngineConfig.synthetic_acceptance`; ConfigError unless there is one per position and none rises.
    """
    k = num_speculative_tokens
    if isinstance(synthetic, int | float):
        return (float(synthetic),) * k
    shares = [1.0, *synthetic]
    if len(shares) != k + 1:
        raise ConfigError(f"synthetic_acceptance {list(synthetic)}: give {k} shares, one per draft token")
    if any(after > before for before, after in pairwise(shares)):
        raise ConfigError(
            f"synthetic_acceptance {list(synthetic)} rises; a draft token is accepted only where all before it are"
        )
    return tuple(after / before if before else 0.0 for before, after in pairwise(shares))
