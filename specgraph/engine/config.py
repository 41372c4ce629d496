"""The limits and choices of a decoder: those of its drafter, and those that only a whole engine has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from specgraph.draft import DraftConfig
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
        if self.round_times is not None:
            check_times(self.round_times, self.sizes, self.k_candidates)
        if self.synthetic_acceptance is not None:
            acceptance_chances(self.synthetic_acceptance, self.num_speculative_tokens)

    def verified(self, num_requests: int, num_drafts: int) -> int:
        """Return how many of the `num_drafts` of a padded batch a verify takes; 0 if it takes all, as
        `BatchDescriptor.verified`.
        """
        average = self.verified_drafts
        return 0 if average is None else min(num_drafts, max(1, int(num_requests * average)))


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
