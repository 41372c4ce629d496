"""What a drafter is asked to do: the limits of its runner, K, and how drafts are chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from specgraph.errors import ConfigError
from specgraph.options import DraftSampling
from specgraph.runner import RunnerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig(RunnerConfig):
    """Limits and choices of one drafter.

    Raises:
        ConfigError: a number is out of range.
    """

    num_speculative_tokens: int
    """K, draft tokens per propose; with a schedule the largest K."""
    draft_schedule: Mapping[int, int] | None = None
    """K by batch: {largest number of requests: K}. A batch takes the K of the first entry that holds its padded size,
    so that every captured size has one K. None always drafts num_speculative_tokens.

    K 0 gives no drafts, and the next round is plain decode. The drafter's first pass still runs, so that its KV is
    complete and drafting can go on when the batch is small again."""
    sampled: bool = False
    """Requests may have temperatures above 0."""
    draft_sampling: DraftSampling = "sampled"
    """How the drafts of such requests are chosen. "sampled" draws them by the request's temperature and keeps their
    distributions, float32 [max_num_requests, K, draft_vocab]; "greedy" takes the most likely tokens. The output has the
    target's distribution either way (`kernels.verify_sampled`); which is accepted more often depends on the pair."""

    @property
    def keeps_draft_probs(self) -> bool:
        """Whether drafts are drawn by temperature."""
        return self.sampled and self.draft_sampling == "sampled"

    def __post_init__(self) -> None:
        RunnerConfig.__post_init__(self)
        if self.draft_sampling not in get_args(DraftSampling):
            raise ConfigError(f"draft_sampling is '{self.draft_sampling}'; it is 'sampled' or 'greedy'")
        k = self.num_speculative_tokens
        if k < 1:
            raise ConfigError(f"num_speculative_tokens must be at least 1, got {k}")
        if k >= self.max_model_len:
            raise ConfigError(f"num_speculative_tokens is {k}, and max_model_len only {self.max_model_len}")
        if self.draft_schedule is None:
            return
        for limit, tokens in self.draft_schedule.items():
            if limit < 1 or not 0 <= tokens <= k:
                raise ConfigError(
                    f"draft_schedule {{{limit}: {tokens}}}: batches have at least 1 request, and K is 0 to "
                    f"num_speculative_tokens = {k}"
                )
        if not any(self.draft_schedule.values()):
            raise ConfigError("draft_schedule drafts no token at any size: decode without a drafter instead")
        if max(self.draft_schedule) < self.max_num_requests:
            raise ConfigError(
                f"draft_schedule ends at {max(self.draft_schedule)} requests, batches go up to "
                f"max_num_requests = {self.max_num_requests}: add an entry for it"
            )

    @property
    def query_len(self) -> int:
        """Rows per request in a verify of the most draft tokens, and in step 0 after it: K + 1."""
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
    def max_blocks(self) -> int:
        """Columns of the block table: room for every row that a padded pass can reach, so that lengths past
        max_model_len read the null block and never past the table."""
        return -(-(self.max_model_len + 2 * self.query_len) // self.block_size)
