"""Requests to a drafter: the limits of its runner, K or the shape of its trees, and how drafts are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from specgraph.capture import RunnerConfig
from specgraph.draft_tree import DraftTree
from specgraph.errors import ConfigError
from specgraph.options import DraftCount, DraftOptions, Schedule
from specgraph.validation import checked_fields


class DraftShape(NamedTuple):
    """The drafts of one propose for each request of a batch."""

    num_speculative_tokens: int
    """K of a chain; of a tree its depth S."""
    tree: bool = False
    """The drafts are the `DraftConfig.tree`, or a chain."""

    @property
    def query_len(self) -> int:
        """Rows per request of the round that verifies it, as the drafter takes it: K + 1."""
        return self.num_speculative_tokens + 1

    def __str__(self) -> str:
        return f"tree of {self.num_speculative_tokens} steps" if self.tree else str(self.num_speculative_tokens)


@checked_fields
@dataclass(frozen=True, kw_only=True)
class DraftConfig(RunnerConfig, DraftOptions):
    """Limits and choices of one drafter.

    Raises:
        ConfigError: a number is out of range, or an option has no such value.
    """

    num_speculative_tokens: DraftCount
    """K, draft tokens per propose; with a schedule the largest K or tree depth."""
    tree: DraftTree | None = None
    """Draft trees of this shape instead of chains: in every batch, num_speculative_tokens being its num_steps, or in
    the batches that the schedule says."""

    @property
    def keeps_draft_probs(self) -> bool:
        """Return whether drafts of chains are drawn by temperature."""
        chains = any(not each.tree for each in self.shapes)
        return self.sampled and self.draft_sampling == "sampled" and chains

    def __post_init__(self) -> None:
        RunnerConfig.__post_init__(self)
        k = self.num_speculative_tokens
        if k >= self.max_model_len:
            raise ConfigError(f"num_speculative_tokens is {k}, and max_model_len only {self.max_model_len}")
        if self.k_candidates is not None:
            self._check_candidates(self.k_candidates)
        if self.draft_schedule is not None:
            self._check_schedule(self.draft_schedule)
        elif self.tree is not None and self.tree.num_steps != k:
            raise ConfigError(f"num_speculative_tokens is {k}, and the draft tree has {self.tree.num_steps} steps")

    def _check_candidates(self, candidates: Sequence[int]) -> None:
        if self.draft_schedule is not None or self.tree is not None:
            raise ConfigError("k_candidates choose K by acceptance: leave out draft_schedule and draft trees")
        if not candidates or list(candidates) != sorted(set(candidates)):
            raise ConfigError(f"k_candidates {list(candidates)}: give ascending K of at least 1, such as 1,2,3,5")
        if candidates[-1] != self.num_speculative_tokens:
            raise ConfigError(
                f"k_candidates end at {candidates[-1]}, and num_speculative_tokens, the largest, is "
                f"{self.num_speculative_tokens}"
            )

    def _check_schedule(self, schedule: Schedule) -> None:
        k = self.num_speculative_tokens
        for limit, drafts in schedule.items():
            if drafts != "tree" and drafts > k:
                raise ConfigError(
                    f"draft_schedule {{{limit}: {drafts}}}: K is 0 to num_speculative_tokens = {k}, or 'tree'"
                )
        if ("tree" in schedule.values()) != (self.tree is not None):
            missing = "names no 'tree'" if self.tree is not None else "has 'tree', and the shape of the tree is missing"
            raise ConfigError(
                f"draft_schedule {dict(schedule)} {missing}: a tree needs its three numbers, and an entry for the "
                "batches that draft it, such as 4:tree,16:3"
            )
        if self.tree is not None and self.tree.num_steps > k:
            raise ConfigError(f"num_speculative_tokens is {k}, and the draft tree has {self.tree.num_steps} steps")
        if not any(schedule.values()):
            raise ConfigError("draft_schedule drafts no token at any size: decode without a drafter instead")
        if max(schedule) < self.max_num_requests:
            raise ConfigError(
                f"draft_schedule ends at {max(schedule)} requests, batches go up to "
                f"max_num_requests = {self.max_num_requests}: add an entry for it"
            )

    @property
    def query_len(self) -> int:
        """Rows per request in a verify of the most draft tokens, and in step 0 after it: the largest K + 1."""
        return self.query_lens[-1]

    @property
    def shapes(self) -> frozenset[DraftShape]:
        """Every shape that a propose may draft."""
        if self.k_candidates is not None:
            return frozenset(map(DraftShape, self.k_candidates))
        if self.draft_schedule is not None:
            return frozenset(self._shape(each) for each in self.draft_schedule.values())
        return frozenset([self._shape(self.num_speculative_tokens if self.tree is None else "tree")])

    def shapes_at(self, num_requests: int) -> tuple[DraftShape, ...]:
        """Return the drafts that a batch of this padded size may have: one shape, or one for each of k_candidates."""
        if self.k_candidates is None:
            return (self.shape(num_requests),)
        return tuple(sorted(self.shapes))

    def shape(self, num_requests: int) -> DraftShape:
        """Return the drafts of a batch of this padded size where no K is asked for: the largest of k_candidates."""
        if self.draft_schedule is None:
            return max(self.shapes)
        return self._shape(self.draft_schedule[min(limit for limit in self.draft_schedule if limit >= num_requests)])

    def _shape(self, entry: int | Literal["tree"]) -> DraftShape:
        if entry == "tree":
            assert self.tree is not None
            return DraftShape(self.tree.num_steps, tree=True)
        return DraftShape(entry)

    @property
    def query_lens(self) -> tuple[int, ...]:
        """Rows per request that the round before a propose may have: K + 1 for every K and tree depth, ascending."""
        return tuple(sorted({each.query_len for each in self.shapes}))

    @property
    def chain_lens(self) -> tuple[int, ...]:
        """Rows per request that the verify of a chain may have: K + 1 for every K, ascending."""
        return tuple(sorted({each.query_len for each in self.shapes if not each.tree}))

    @property
    def max_blocks(self) -> int:
        """Columns of the block table: room for every row that a padded pass can reach, so that lengths past
        max_model_len read the null block and never past the table; and for the nodes of a tree."""
        return -(-(self.max_model_len + 2 * self.query_len + self.scratch_tokens) // self.block_size)

    @property
    def scratch_tokens(self) -> int:
        """KV slots that each request needs behind its last token, however long it is: those of a tree's nodes."""
        return 0 if self.tree is None else self.tree.scratch_tokens
