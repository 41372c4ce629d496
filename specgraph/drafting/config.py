"""What a drafter is asked to be, checked before anything touches the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from specgraph.errors import ConfigError
from specgraph.graphs import GraphMode, capture_sizes, prefill_sizes
from specgraph.options import Fallback, LoweringChoice, ModeChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """Limits and choices of one drafter.

    Raises:
        ConfigError: a number is out of range.
    """

    num_speculative_tokens: int
    """K, draft tokens a propose; with a schedule the largest K."""
    max_num_requests: int
    """The largest batch."""
    max_model_len: int
    """Tokens of the longest request, prompt included."""
    block_size: int = 16
    """Tokens per KV block."""
    capture_sizes: Sequence[int] | None = None
    """Request counts to capture; a default ladder up to max_num_requests."""
    draft_schedule: Mapping[int, int] | None = None
    """K by batch: {largest number of requests: K}. A batch takes the K of the first entry that holds its padded size,
    so that every captured size has one K. None drafts num_speculative_tokens always.

    K 0 hands out no drafts, and the next round is plain decode. The drafter's first pass still runs, so that its KV is
    complete and drafting can go on when the batch is small again."""
    prefill_sizes: Sequence[int] | None = None
    """Rows of prompt passes to capture, the last one the longest; a default ladder up to 512."""
    mode: ModeChoice = "auto"
    """Which passes run from graphs, of target and drafter alike; the fastest that the platform allows."""
    lowering: LoweringChoice = "auto"
    """How the draft loop becomes graphs; the strongest that goes with the mode."""
    sampled: bool = False
    """Draw drafts by temperature and keep their distributions; otherwise drafts are greedy."""
    synthetic_acceptance: float | Sequence[float] | None = None
    """For measuring speed: accept drafts by chance instead of by the target. A number is the chance that a draft token
    stands when all before it do; a list gives, for each of the K positions, the share of drafts accepted there. The
    output is then not the target's."""
    fallback: Fallback = "error"
    """What to do with a batch larger than every captured size."""
    check_inputs: bool = False
    """Compare the addresses of all that a graph reads before every replay."""

    def __post_init__(self) -> None:
        for name, least in (("num_speculative_tokens", 1), ("max_num_requests", 1), ("max_model_len", 2)):
            if (value := getattr(self, name)) < least:
                raise ConfigError(f"{name} must be at least {least}, got {value}")
        if self.block_size < 1:
            raise ConfigError(f"block_size must be at least 1, got {self.block_size}")
        if self.num_speculative_tokens >= self.max_model_len:
            raise ConfigError(
                f"num_speculative_tokens is {self.num_speculative_tokens}, and max_model_len only {self.max_model_len}"
            )
        self._check_schedule()
        if self.synthetic_acceptance is not None:
            acceptance_chances(self.synthetic_acceptance, self.num_speculative_tokens)
        prefill_sizes(self.max_model_len, self.prefill_sizes)
        sizes = capture_sizes(self.max_num_requests, self.capture_sizes)
        if (
            self.fallback == "error"
            and "eager" not in (self.lowering, self._decode)
            and sizes[-1] < self.max_num_requests
        ):
            raise ConfigError(
                f"the largest capture size is {sizes[-1]}, batches go up to max_num_requests = "
                f"{self.max_num_requests}, and fallback is 'error'. Capture {self.max_num_requests} too, lower "
                "max_num_requests, or allow fallback='eager'."
            )

    @property
    def _decode(self) -> str:
        return "auto" if self.mode == "auto" else GraphMode.named(self.mode).decode

    def _check_schedule(self) -> None:
        if self.draft_schedule is None:
            return
        most = self.num_speculative_tokens
        for limit, k in self.draft_schedule.items():
            if limit < 1 or not 0 <= k <= most:
                raise ConfigError(
                    f"draft_schedule {{{limit}: {k}}}: batches have at least 1 request, and K is 0 to "
                    f"num_speculative_tokens = {most}"
                )
        if not any(self.draft_schedule.values()):
            raise ConfigError("draft_schedule drafts no token at any size: decode without a drafter instead")
        if max(self.draft_schedule, default=0) < self.max_num_requests:
            raise ConfigError(
                f"draft_schedule ends at {max(self.draft_schedule, default=0)} requests, batches go up to "
                f"max_num_requests = {self.max_num_requests}: add an entry for it"
            )

    @property
    def query_len(self) -> int:
        """Rows per request in a verify of the most draft tokens, and in step 0 after it."""
        return self.num_speculative_tokens + 1

    def draft_tokens(self, num_requests: int) -> int:
        """K for a batch of this padded size."""
        if self.draft_schedule is None:
            return self.num_speculative_tokens
        return self.draft_schedule[min(limit for limit in self.draft_schedule if limit >= num_requests)]

    @property
    def query_lens(self) -> tuple[int, ...]:
        """Rows per request that a verify may have: K + 1 for every K, ascending."""
        every = [self.num_speculative_tokens] if self.draft_schedule is None else self.draft_schedule.values()
        return tuple(sorted({k + 1 for k in every}))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Request counts to capture, ascending."""
        return capture_sizes(self.max_num_requests, self.capture_sizes)

    @property
    def prompt_sizes(self) -> tuple[int, ...]:
        """Rows of prompt passes, ascending."""
        return prefill_sizes(self.max_model_len, self.prefill_sizes)

    @property
    def max_blocks(self) -> int:
        """Columns of the block table: room for every row that a padded pass can reach, so that lengths past
        max_model_len read the null block and never past the table."""
        return -(-(self.max_model_len + 2 * self.query_len) // self.block_size)


def acceptance_chances(synthetic: float | Sequence[float], num_speculative_tokens: int) -> tuple[float, ...]:
    """For each position, the chance that its token stands when all before it do.

    Args:
        synthetic: as `DraftConfig.synthetic_acceptance`.

    Raises:
        ConfigError: not a share, not one a position, or rising: a token stands only where those before it do.
    """
    k = num_speculative_tokens
    if isinstance(synthetic, int | float):
        if not 0 <= synthetic <= 1:
            raise ConfigError(f"synthetic_acceptance {synthetic} is not in 0..1")
        return (float(synthetic),) * k
    shares = [1.0, *synthetic]
    if len(shares) != k + 1 or any(not 0 <= share <= 1 for share in shares):
        raise ConfigError(f"synthetic_acceptance {list(synthetic)}: give {k} shares (one a draft token), each in 0..1")
    if any(after > before for before, after in pairwise(shares)):
        raise ConfigError(
            f"synthetic_acceptance {list(synthetic)} rises; a draft token is accepted only where all before it are"
        )
    return tuple(after / before if before else 0.0 for before, after in pairwise(shares))
