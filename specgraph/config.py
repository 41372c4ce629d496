"""An engine's choices before anything is captured: the options of a drafter, and the limits of its target.

`DraftConfig` is what a `Drafter`, its target and every runner of captured graphs are made for. Importing this module
does not import torch, so that commands refuse a wrong option at once.
"""
# ruff: noqa: RUF009

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from specgraph.errors import ConfigError
from specgraph.validation import Count, Gone, ModelLen, Range, Requests, Tokens, checked_fields

if TYPE_CHECKING:
    from typing_extensions import Self

LoweringChoice = Annotated[
    Literal["auto", "eager", "piecewise", "step", "merged"],
    Gone("round", "a whole round in one launch was no faster than a propose in one; give 'merged'"),
]
PrefillChoice = Literal["auto", "eager", "piecewise", "full"]
Fallback = Literal["error", "eager"]
KVCacheDtype = Literal["auto", "fp8"]
DraftSampling = Literal["sampled", "greedy"]
DraftCount = Annotated[int, Range(1, 63)]
"""K: a verify has K + 1 rows per request, at most `MAX_TREE_LEN` as a tree's."""
Schedule = Mapping[Requests, Annotated[int, Range(0, 63)] | Literal["tree"]]


def option(default: Any, text: str, *flags: str, parse: Callable[[str], Any] | None = None) -> Any:
    """Return a field that is an option of the commands; `text`, one sentence, is shown by `--help`.

    `flags` are `--` and the field's name by default; `parse` turns the command line's text into the field's value, or
    raises ValueError.
    """
    return field(default=default, metadata={"help": text, "flags": flags, "parse": parse})


def _integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError("give whole numbers, comma-separated") from None


def _schedule(text: str) -> dict[int, int | Literal["tree"]]:
    parts = [part.partition(":") for part in text.split(",")]
    try:
        return {int(limit): "tree" if drafts == "tree" else int(drafts) for limit, _, drafts in parts}
    except ValueError:
        raise ValueError("give REQUESTS:K or REQUESTS:tree, comma-separated, such as 4:5,16:3") from None


def capture_sizes(max_num_requests: int, asked: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return the numbers of requests to capture, ascending.

    Sizes of uniform batches count requests. Rows follow per phase as requests times rows per request, so step 0
    (K + 1 rows per request) and the later steps (1 row per request) share one list, and no size can be misaligned to
    K + 1. By default 1, 2, 4, then multiples of 8 up to 64, then multiples of 16, and always `max_num_requests`
    itself. Sizes that the user names are captured exactly as named, or refused.

    Raises:
        ConfigError: a named size is not in 1..max_num_requests, or is named twice.
    """
    if asked is None:
        ladder = [1, 2, 4, *range(8, 65, 8), *range(80, max_num_requests, 16)]
        return (*(size for size in ladder if size < max_num_requests), max_num_requests)
    return _checked("capture sizes", asked, max_num_requests, "max_num_requests")


def prefill_sizes(max_model_len: int, asked: Sequence[int] | None = None, longest: int = 512) -> tuple[int, ...]:
    """Return the rows of prefill passes to capture, ascending; the last one is also the longest chunk of a prompt.

    By default powers of two from 16 to `longest`, or to `max_model_len` if that is less.

    Raises:
        ConfigError: a named size is not in 1..max_model_len, or is named twice.
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
    """Raise ConfigError for n-grams of which the shortest is longer than the longest."""
    if prompt_lookup_min > prompt_lookup_max:
        raise ConfigError(
            f"prompt_lookup_min {prompt_lookup_min} is more than prompt_lookup_max {prompt_lookup_max}: n-grams are "
            "looked for from the longest down to the shortest"
        )


def check_layout(tensor_parallel: int, data_parallel: int, expert_parallel: bool, decode_context_parallel: int) -> None:
    """Raise ConfigError for data parallel ranks that share nothing, or context parallel ranks that don't divide the
    tensor parallel ones.
    """
    if data_parallel > 1 and not expert_parallel:
        raise ConfigError(
            f"data_parallel {data_parallel} without enable_expert_parallel: these ranks would share nothing. Give "
            "both for a mixture of experts; for independent replicas start each as a run of its own"
        )
    if tensor_parallel % decode_context_parallel:
        raise ConfigError(
            f"decode_context_parallel {decode_context_parallel}, tensor_parallel {tensor_parallel}: ranks that share "
            "keys are some of those that split the matrices; choose a divisor"
        )


MAX_TREE_LEN = 64
"""Bits in a word of `AttentionMetadata.ancestors`."""


@checked_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTree:
    """The shape of the trees that are drafted, in SGLang's terms; see docs/adr/0007-draft-trees.md.

    Raises:
        ConfigError: a number is out of range.
    """

    num_steps: Count
    """S: draft steps, the depth of the deepest node (speculative_num_steps)."""
    top_k: Count
    """k: tokens that follow each expanded node, and nodes that each later step expands (speculative_eagle_topk)."""
    num_draft_tokens: Count
    """N: rows per request in a verify, the request's last token and N - 1 nodes (speculative_num_draft_tokens)."""

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


@dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """Options of a drafter, and of whatever else captures and runs the programs of a model."""

    max_num_requests: Requests = option(1, "Requests in the largest batch.")
    capture_sizes: Sequence[Requests] | None = option(
        None, "Batch sizes to capture, comma-separated. Default: a ladder up to max_num_requests.", parse=_integers
    )
    prefill_sizes: Sequence[Tokens] | None = option(
        None, "Rows of prefill passes to capture, comma-separated. Default: up to 512, on cpu 128.", parse=_integers
    )
    decode: LoweringChoice = option("auto", "How the draft loop becomes graph launches.", parse=str.lower)
    prefill: PrefillChoice = option(
        "auto", "How prompts run: op by op, from graphs between attention calls, or as one graph per pass."
    )
    fallback: Fallback = option("error", "What happens to a batch larger than every captured size.")
    check_inputs: bool = option(False, "Compare the addresses of all tensors that a graph reads before every replay.")
    """It takes some microseconds per launch."""
    debug: bool = option(False, "Check the values of every batch before it is drafted for; waits for the device.")
    """The values are token ids, counts, positions, block ids and hidden states. It is also checked that no two requests
    write one block, and that this drafter has written the key of every position before a request's rows, those of its
    prompt too."""
    k_candidates: Sequence[DraftCount] | None = option(
        None, "With -k auto: K to choose from, comma-separated. Default: 1,2,3,5.", parse=_integers
    )
    """Each of these K of a `DraftConfig`, ascending, is captured at every size, and `Drafter.propose` is told which to
    draft; num_speculative_tokens is the largest of them."""
    draft_schedule: Schedule | None = option(
        None,
        "K by batch size: 4:5,16:3 drafts 5 tokens for up to 4 requests, 3 for up to 16. 4:tree,16:3 drafts trees, "
        "of the three --speculative options, for up to 4.",
        parse=_schedule,
    )
    """A batch takes the first entry that holds its padded size, so that every captured size drafts one thing. None
    always drafts num_speculative_tokens.

    K 0 gives no drafts, and the next round is plain decode. The drafter's first pass (of several MTP modules every one)
    still runs, so that its KV is complete and drafting can go on when the batch is small again. "tree" drafts trees,
    which pay while the target's pass has few rows, so they are for the smallest batches."""
    sampled: bool = option(False, "Allow temperatures above 0.")
    draft_sampling: DraftSampling = option(
        "sampled", "Drafts of requests above temperature 0: drawn by temperature too, or greedy. Lossless either way."
    )
    """"sampled" keeps the distributions of the drafts, float32 [max_num_requests, K, draft_vocab]; "greedy" takes the
    most likely tokens. The output has the target's distribution either way (`verify_drafts`); which is accepted
    more often depends on the pair. The tokens of a tree are always the most likely ones."""


@checked_fields
@dataclass(frozen=True, kw_only=True)
class DraftConfig(DraftOptions):
    """Limits and choices of a target and its drafter, checked before anything touches the device.

    Raises:
        ConfigError: a number is out of range, or an option has no such value.
    """

    max_model_len: ModelLen
    """Tokens of the longest request, prompt included."""
    block_size: Tokens = 16
    """Tokens per KV block."""
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
        """Return max_model_len and block_size, which ops take in this order."""
        return self.max_model_len, self.block_size

    @property
    def prefill_rows(self) -> tuple[int, ...]:
        """Return the rows of prefill passes, ascending."""
        return prefill_sizes(self.max_model_len, self.prefill_sizes)

    def with_prefill_sizes(self, longest: int) -> Self:
        """Return the config with its prefill sizes named: where they are not, those of up to `longest` rows."""
        return replace(self, prefill_sizes=prefill_sizes(self.max_model_len, self.prefill_sizes, longest))

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
