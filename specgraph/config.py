"""The configuration of a drafter: its options, and the limits of its target.

A `Drafter`, its target and every other model runner are made for one `DraftConfig`. Importing this module does not
import torch, so that commands refuse a wrong option at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from specgraph.errors import ConfigError
from specgraph.validation import Count, Gone, ModelLen, Range, Requests, Tokens, checked_fields

if TYPE_CHECKING:
    from typing_extensions import Self

LoweringChoice = Annotated[
    Literal["auto", "eager", "piecewise", "step", "merged"],
    Gone("round", "a whole round in one launch was no faster than a propose in one; give 'merged'"),
]
PrefillChoice = Literal["auto", "eager", "piecewise", "full"]
DraftCount = Annotated[int, Range(1, 63)]
"""K. A verify has K + 1 rows per request, at most `MAX_TREE_LEN`, which is also the limit of a tree."""
Schedule = Mapping[Requests, Annotated[int, Range(0, 63)] | Literal["tree"]]


def capture_sizes(max_num_requests: int, asked: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return the numbers of requests to capture, ascending.

    A size counts requests, not rows. Draft step 0 (K + 1 rows per request) and the later ones (1 row per request)
    therefore share one list, and no size can be misaligned to K + 1. The default is 1, 2, 4, then multiples of 8 up to
    64, then multiples of 16, and always `max_num_requests` itself.

    Raises:
        ConfigError: `asked` is empty, or has a size outside 1..max_num_requests or the same size twice.
    """
    if asked is None:
        ladder = [1, 2, 4, *range(8, 65, 8), *range(80, max_num_requests, 16)]
        return (*(size for size in ladder if size < max_num_requests), max_num_requests)
    return _checked("capture sizes", asked, max_num_requests, "max_num_requests")


def prefill_sizes(max_model_len: int, asked: Sequence[int] | None = None, longest: int = 512) -> tuple[int, ...]:
    """Return the numbers of rows of the prefill passes to capture, ascending.

    The last one is also the length of the longest prefill chunk. The default is the powers of two from 16 to 256 that
    are below `longest`, then `longest` itself. If `max_model_len` is less, it takes the place of `longest`.

    Raises:
        ConfigError: `asked` is empty, or has a size outside 1..max_model_len or the same size twice.
    """
    if asked is not None:
        return _checked("prefill sizes", asked, max_model_len, "max_model_len")
    longest = min(longest, max_model_len)
    return (*(size for size in (16, 32, 64, 128, 256) if size < longest), longest)


def _checked(what: str, asked: Sequence[int], limit: int, limit_name: str) -> tuple[int, ...]:
    if not asked:
        raise ConfigError(f"{what}: the list is empty; name at least one size, or use decode 'eager'")
    wrong = [size for size in asked if not 1 <= size <= limit]
    if wrong:
        raise ConfigError(f"{what} {wrong} are outside 1..{limit} ({limit_name})")
    if len(set(asked)) != len(asked):
        raise ConfigError(f"{what} {list(asked)} name a size twice")
    return tuple(sorted(asked))


def check_ngrams(prompt_lookup_max: int, prompt_lookup_min: int) -> None:
    """Raise ConfigError if the shortest n-gram is longer than the longest."""
    if prompt_lookup_min > prompt_lookup_max:
        raise ConfigError(
            f"prompt_lookup_min {prompt_lookup_min} is more than prompt_lookup_max {prompt_lookup_max}: n-grams are "
            "looked for from the longest down to the shortest"
        )


MAX_TREE_LEN = 64
"""The most rows per request in a tree's verify, and the most keys of its later draft steps. Each is one bit in a word
of `AttentionMetadata.ancestors`."""


@checked_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTree:
    """The shape of the drafted trees, in SGLang's terms. See docs/adr/0007-draft-trees.md.

    Raises:
        ConfigError: a number is out of range, or the numbers don't fit each other.
    """

    num_steps: Count
    """S: the number of draft steps, which is the depth of the tree (speculative_num_steps)."""
    top_k: Count
    """k: the successors of each expanded node, and the nodes that each later draft step expands
    (speculative_eagle_topk)."""
    num_draft_tokens: Count
    """N: the rows per request in a verify. They are the last token and N - 1 nodes (speculative_num_draft_tokens)."""

    def __post_init__(self) -> None:
        s, k, n = self.num_steps, self.top_k, self.num_draft_tokens
        asked = f"speculative_num_steps {s}, speculative_eagle_topk {k}, speculative_num_draft_tokens {n}"
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
        """C: the tokens that are drawn per tree. The N - 1 best of them are verified."""
        return self.top_k + (self.num_steps - 1) * self.top_k**2

    @property
    def step_keys(self) -> int:
        """The keys per request that draft steps 1 to S - 1 write after the context. At least 1."""
        return max(1, (self.num_steps - 1) * self.top_k)

    @property
    def scratch_tokens(self) -> int:
        """The KV slots per request for the nodes of a tree, after the slots of its tokens. A node may lie past
        max_model_len."""
        return max(self.num_draft_tokens, self.step_keys)


class DraftShape(NamedTuple):
    """The drafts of one propose for each request of a batch."""

    num_speculative_tokens: int
    """K of a chain, or the depth S of a tree."""
    tree: bool = False
    """True for a tree of the shape `DraftConfig.tree`, False for a chain."""

    @property
    def query_len(self) -> int:
        """The rows per request that a propose takes from the verify of these drafts: K + 1, or S + 1 of a tree."""
        return self.num_speculative_tokens + 1

    def __str__(self) -> str:
        return f"tree of {self.num_speculative_tokens} steps" if self.tree else str(self.num_speculative_tokens)


@dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """The options of a drafter and of every other model runner."""

    max_num_requests: Requests = 1
    """Requests in the largest batch."""
    capture_sizes: Sequence[Requests] | None = None
    """Batch sizes to capture. None for those of `specgraph.config.capture_sizes`."""
    prefill_sizes: Sequence[Tokens] | None = None
    """Rows of prefill passes to capture. None for sizes up to `Capabilities.longest_prefill`."""
    decode: LoweringChoice = "auto"
    """The lowering of verify and propose passes."""
    prefill: PrefillChoice = "auto"
    """The mode of prompts: op by op, from graphs between attention calls, or as one graph per pass."""
    fallback: Literal["error", "eager"] = "error"
    """The way of a batch larger than every captured size."""
    check_inputs: bool = False
    """Compare the addresses of all tensors that a graph reads before every replay. It takes some microseconds."""
    debug: bool = False
    """Check the values of every batch before it is drafted for, which waits for the device: token ids, counts,
    positions, block ids and hidden states. No two requests may write the same block. The drafter must have written the
    key of every position before a request's rows, prompt included."""
    k_candidates: Sequence[DraftCount] | None = None
    """K to choose from. In a `DraftConfig` they are ascending, and the last is num_speculative_tokens. Every K is
    captured at every size, and the caller of `Drafter.propose` chooses one."""
    draft_schedule: Schedule | None = None
    """K by batch size: {4: 5, 16: 3} drafts 5 tokens for up to 4 requests, 3 for up to 16. A batch takes the entry with
    the smallest limit that holds its padded size, so that every captured size has one shape. None if all batches draft
    the same.

    With K 0 there are no drafts, and the next verify is plain decode. The first draft step still runs (with several MTP
    modules all of them do), so that the drafter's KV cache is complete when the batch is small enough to draft again.
    "tree" drafts trees. They pay while the target's pass has few rows, so they are for the smallest batches."""
    sampled: bool = False
    """Allow temperatures above 0."""
    draft_sampling: Literal["sampled", "greedy"] = "sampled"
    """"sampled" keeps the distributions of the drafts, float32 [max_num_requests, K, draft_vocab]; "greedy" takes the
    most likely tokens. The output has the target's distribution either way (`verify_drafts`). Which drafts are accepted
    more often depends on the target and drafter. A tree always has the most likely tokens."""


@checked_fields
@dataclass(frozen=True, kw_only=True)
class DraftConfig(DraftOptions):
    """The limits and options of a target and its drafter, checked before anything touches the device.

    Raises:
        ConfigError: a number is out of range, an option has no such value, or two fields contradict each other.
    """

    max_model_len: ModelLen
    """Tokens of the longest request, prompt included."""
    block_size: Tokens = 16
    """Tokens per KV block."""
    num_speculative_tokens: DraftCount
    """K: the draft tokens per propose. With a schedule, no K and no tree depth in it may be larger."""
    tree: DraftTree | None = None
    """The shape of draft trees. None drafts chains. Without a schedule every batch drafts trees, and
    num_speculative_tokens is the tree's num_steps. With a schedule only the batches of its "tree" entries do."""

    @property
    def keeps_draft_probs(self) -> bool:
        """Return whether any batch drafts chains that are drawn by temperature."""
        chains = any(not each.tree for each in self.shapes)
        return self.sampled and self.draft_sampling == "sampled" and chains

    def __post_init__(self) -> None:
        prefill_sizes(self.max_model_len, self.prefill_sizes)
        sizes = capture_sizes(self.max_num_requests, self.capture_sizes)
        if self.fallback == "error" and self.decode != "eager" and sizes[-1] < self.max_num_requests:
            raise ConfigError(
                f"the largest capture size is {sizes[-1]}, batches go up to max_num_requests = "
                f"{self.max_num_requests}, and fallback is 'error'. Capture {self.max_num_requests} too, lower "
                "max_num_requests, or allow fallback='eager'."
            )
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
    def sizes(self) -> tuple[int, ...]:
        """Return the numbers of requests to capture, ascending."""
        return capture_sizes(self.max_num_requests, self.capture_sizes)

    @property
    def limits(self) -> tuple[int, int]:
        """Return max_model_len and block_size, in the order in which ops take them."""
        return self.max_model_len, self.block_size

    @property
    def prefill_rows(self) -> tuple[int, ...]:
        """Return the numbers of rows that prefill passes may have, ascending."""
        return prefill_sizes(self.max_model_len, self.prefill_sizes)

    def with_prefill_sizes(self, longest: int) -> Self:
        """Return this config with `prefill_sizes` set. If it has none, they are the default sizes up to `longest`."""
        return replace(self, prefill_sizes=prefill_sizes(self.max_model_len, self.prefill_sizes, longest))

    @property
    def query_len(self) -> int:
        """The most rows per request that a propose takes from a verify: the largest K + 1 or tree depth + 1."""
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
        """Return the shapes that a batch of this padded size may draft: one, or one for each of k_candidates."""
        if self.k_candidates is None:
            return (self.shape(num_requests),)
        return tuple(sorted(self.shapes))

    def shape(self, num_requests: int) -> DraftShape:
        """Return the shape that a batch of this padded size drafts if the caller names no K.

        With k_candidates it is the largest of them.
        """
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
        """The numbers of rows per request that a propose may take from a verify: K + 1 for every K and tree depth,
        ascending."""
        return tuple(sorted({each.query_len for each in self.shapes}))

    @property
    def chain_lens(self) -> tuple[int, ...]:
        """The numbers of rows per request that the verify of a chain may have: K + 1 for every K, ascending."""
        return tuple(sorted({each.query_len for each in self.shapes if not each.tree}))

    @property
    def max_blocks(self) -> int:
        """The columns of the block table. They suffice for every row of a padded pass and for the nodes of a tree:
        lengths past max_model_len read the null block, and never past the table."""
        return -(-(self.max_model_len + 2 * self.query_len + self.scratch_tokens) // self.block_size)

    @property
    def scratch_tokens(self) -> int:
        """The KV slots that each request, however long, needs after its last token for a tree's nodes. 0 for chains."""
        return 0 if self.tree is None else self.tree.scratch_tokens
