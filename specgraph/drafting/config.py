"""What a drafter is asked to do: the limits of its runner, K, and how drafts are chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from specgraph.attention import MAX_TREE_LEN
from specgraph.errors import ConfigError
from specgraph.options import DraftSampling
from specgraph.runner import RunnerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTree:
    """The shape of the trees that are drafted, in SGLang's terms; see docs/adr/0007-draft-trees.md.

    Raises:
        ConfigError: a number is out of range.
    """

    num_steps: int
    """S: draft steps, the depth of the deepest node (speculative_num_steps)."""
    top_k: int
    """k: tokens that follow each expanded node, and nodes that each later step expands (speculative_eagle_topk)."""
    num_draft_tokens: int
    """N: rows per request in a verify, the request's last token and N - 1 nodes (speculative_num_draft_tokens)."""

    def __post_init__(self) -> None:
        s, k, n = self.num_steps, self.top_k, self.num_draft_tokens
        asked = f"speculative_num_steps {s}, speculative_eagle_topk {k}, speculative_num_draft_tokens {n}"
        if s < 1 or k < 1:
            raise ConfigError(f"{asked}: a tree needs at least 1 step and top-k 1")
        if not s + 1 <= n <= self.num_candidates + 1:
            raise ConfigError(
                f"{asked}: speculative_num_draft_tokens counts the last token and the nodes of the tree, so it is "
                f"{s + 1} (one path) to {self.num_candidates + 1} (all that is drawn)"
            )
        if max(n, self.step_keys) > MAX_TREE_LEN:
            raise ConfigError(
                f"{asked}: a verify may have {MAX_TREE_LEN} rows per request and the draft steps after the first "
                f"{MAX_TREE_LEN} together, here (steps - 1) * topk = {(s - 1) * k}; ask for a smaller tree"
            )

    def __str__(self) -> str:
        return f"{self.num_steps}, {self.top_k}, {self.num_draft_tokens}"

    @property
    def num_candidates(self) -> int:
        """C: tokens that are drawn, of which the N - 1 best are verified."""
        return self.top_k + (self.num_steps - 1) * self.top_k**2

    @property
    def step_keys(self) -> int:
        """Keys per request that the draft steps after the first write behind the context; at least 1."""
        return max(1, (self.num_steps - 1) * self.top_k)

    @property
    def scratch_tokens(self) -> int:
        """KV slots per request behind its tokens for the nodes of a tree: a node of a permitted depth may lie past
        max_model_len."""
        return max(self.num_draft_tokens, self.step_keys)


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
    tree: DraftTree | None = None
    """Draft trees of this shape instead of chains; num_speculative_tokens is its num_steps."""
    sampled: bool = False
    """Requests may have temperatures above 0."""
    draft_sampling: DraftSampling = "sampled"
    """How the drafts of such requests are chosen. "sampled" draws them by the request's temperature and keeps their
    distributions, float32 [max_num_requests, K, draft_vocab]; "greedy" takes the most likely tokens. The output has the
    target's distribution either way (`kernels.verify_sampled`); which is accepted more often depends on the pair. The
    tokens of a tree are always the most likely ones."""

    @property
    def keeps_draft_probs(self) -> bool:
        """Whether drafts are drawn by temperature."""
        return self.sampled and self.draft_sampling == "sampled" and self.tree is None

    def __post_init__(self) -> None:
        RunnerConfig.__post_init__(self)
        if self.draft_sampling not in get_args(DraftSampling):
            raise ConfigError(f"draft_sampling is '{self.draft_sampling}'; it is 'sampled' or 'greedy'")
        if self.lowering == "round" and type(self) is DraftConfig:
            raise ConfigError("lowering 'round' launches a verify with the propose, and a drafter alone has no verify")
        k = self.num_speculative_tokens
        if k < 1:
            raise ConfigError(f"num_speculative_tokens must be at least 1, got {k}")
        if k >= self.max_model_len:
            raise ConfigError(f"num_speculative_tokens is {k}, and max_model_len only {self.max_model_len}")
        if self.tree is not None and self.tree.num_steps != k:
            raise ConfigError(f"num_speculative_tokens is {k}, and the draft tree has {self.tree.num_steps} steps")
        if self.draft_schedule is None:
            return
        if self.tree is not None:
            raise ConfigError("a draft_schedule sets K of chains; leave it out, or the three numbers of a draft tree")
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
        max_model_len read the null block and never past the table; and for the nodes of a tree."""
        return -(-(self.max_model_len + 2 * self.query_len + self.scratch_tokens) // self.block_size)

    @property
    def scratch_tokens(self) -> int:
        """KV slots that each request needs behind its last token, however long it is: those of a tree's nodes."""
        return 0 if self.tree is None else self.tree.scratch_tokens
