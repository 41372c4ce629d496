"""Checks of `DecoderOptions` against the limits of a `DraftConfig`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from specgraph.config import DraftConfig
from specgraph.errors import ConfigError, UnsupportedError
from specgraph_run.decoder.adaptive_k import check_times
from specgraph_run.options import DecoderOptions


def check_options(config: DraftConfig, options: DecoderOptions) -> None:
    """Raise ConfigError if options contradict the limits of target and drafter."""
    if options.round_times is not None:
        check_times(options.round_times, config.sizes, config.k_candidates)
    if options.synthetic_acceptance is not None:
        acceptance_chances(options.synthetic_acceptance, config.num_speculative_tokens)


def check_recurrent(config: DraftConfig, options: DecoderOptions) -> None:
    """Raise UnsupportedError if options ask for passes that a target with recurrent layers cannot run."""
    asked = "draft trees" if config.tree is not None else "verified_drafts" if options.verified_drafts else None
    if asked is not None:
        raise UnsupportedError(
            f"{asked}: the target has recurrent layers (gated delta nets), whose states follow one chain of K drafts "
            "per request; leave the option out"
        )


def acceptance_chances(synthetic: float | Sequence[float], num_speculative_tokens: int) -> tuple[float, ...]:
    """Return, for each draft position, the chance that its token is accepted if all before it are.

    Args:
        synthetic: see `DecoderOptions.synthetic_acceptance`.

    Raises:
        ConfigError: there is not one share per position, or a share is larger than the one before it.
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
