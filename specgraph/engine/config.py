"""What a decoder is asked to do: the limits of its drafter, and those that only a whole engine has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from specgraph.capture.config import check_count
from specgraph.draft import DraftConfig
from specgraph.engine.adaptive_k import check_times
from specgraph.errors import ConfigError
from specgraph.options import KVCacheDtype


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(DraftConfig):
    """Limits and choices of a target with its drafter.

    Raises:
        ConfigError: a number is out of range.
    """

    num_blocks: int | None = None
    """KV blocks of each cache, the null block included; by default enough for max_num_requests of max_model_len."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """fp8: keys and values are stored as e4m3. Scales of the target's layers are in its weights (`load_target`)."""
    prefill_chunk: int | None = None
    """Prompt tokens per prefill pass, at most; by default the largest prefill size."""
    rounds_ahead: int = 1
    """In the lowering `round`: rounds that are launched before the tokens of the last one are read, 0 or 1. Attention
    with host parameters takes 0, because it needs the accepted counts."""
    synthetic_acceptance: float | Sequence[float] | None = None
    """For measuring speed: accept drafts by chance instead of by the target. A number is the chance that a draft token
    is accepted when all before it are; a list gives, for each of the K positions, the share of drafts accepted there.
    The output is then not the target's."""
    synthetic_tree_acceptance: float | Sequence[float] | None = None
    """The same for draft trees, a share per depth; by default that of chains."""

    round_times: Mapping[int, Mapping[int, float]] | None = None
    """With k_candidates, microseconds of a round by padded requests and K, by which K is chosen; measured after the
    capture by default. With a given table the choice follows from nothing but the tokens."""
    sampling_parameters: bool = False
    """Requests may have top_k, top_p, min_p, penalties and logit_bias. What that costs a verify is in
    benchmarks/LESSONS.md, Sampling."""
    logprobs: bool = False
    """Chunks have the log-probability of each token under the target's own distribution, before all parameters."""

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
        if self.prefill_chunk is not None:
            check_count("prefill_chunk", self.prefill_chunk, 1)
        if self.rounds_ahead not in (0, 1):
            raise ConfigError(f"rounds_ahead must be 0 or 1, got {self.rounds_ahead}")
        if self.synthetic_acceptance is not None:
            acceptance_chances(self.synthetic_acceptance, self.num_speculative_tokens)
        if self.synthetic_tree_acceptance is not None:
            if self.tree is None or self.synthetic_acceptance is None:
                raise ConfigError("synthetic_tree_acceptance needs a draft tree, and synthetic_acceptance for chains")
            acceptance_chances(self.synthetic_tree_acceptance, self.tree.num_steps)


def acceptance_chances(synthetic: float | Sequence[float], num_speculative_tokens: int) -> tuple[float, ...]:
    """For each position, the chance that its token is accepted when all before it are.

    Args:
        synthetic: as `EngineConfig.synthetic_acceptance`.

    Raises:
        ConfigError: a number is not in 0..1, there is not one per position, or they rise: a token is accepted only
            where those before it are.
    """
    k = num_speculative_tokens
    if isinstance(synthetic, int | float):
        if not 0 <= synthetic <= 1:
            raise ConfigError(f"synthetic_acceptance {synthetic} is not in 0..1")
        return (float(synthetic),) * k
    shares = [1.0, *synthetic]
    if len(shares) != k + 1 or any(not 0 <= share <= 1 for share in shares):
        raise ConfigError(
            f"synthetic_acceptance {list(synthetic)}: give {k} shares (one per draft token), each in 0..1"
        )
    if any(after > before for before, after in pairwise(shares)):
        raise ConfigError(
            f"synthetic_acceptance {list(synthetic)} rises; a draft token is accepted only where all before it are"
        )
    return tuple(after / before if before else 0.0 for before, after in pairwise(shares))
