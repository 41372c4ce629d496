"""Options, each declared once: `DraftConfig`, `EngineConfig`, `load_generator` and the commands take them from here.

The three that may be left open in `EngineOptions` (num_speculative_tokens, max_model_len, block_size) are fields of the
configs too: there they are the numbers that were settled on.

Importing this module does not import torch, so that `specgraph --help` is fast.
"""
# ruff: noqa: RUF009

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from specgraph.draft_tree import DraftTree
from specgraph.errors import ConfigError, first_line
from specgraph.validation import (
    Count,
    Gone,
    ModelLen,
    NgramTokens,
    Positive,
    Range,
    Requests,
    Share,
    Tokens,
    checked,
    checked_fields,
    shown,
)

if TYPE_CHECKING:
    import torch

    DType = torch.dtype | str | None
else:
    DType = object  # `dtype_named` checks it, once torch is loaded

DTYPES = ("float32", "float16", "bfloat16")
NGRAM = Path("ngram")
"""Takes the place of a drafter's folder, and stands for `NgramHead`, which has none."""
LoweringChoice = Annotated[
    Literal["auto", "eager", "piecewise", "step", "merged"],
    Gone("round", "a whole round in one launch was no faster than a propose in one; give 'merged'"),
]
PrefillChoice = Literal["auto", "eager", "piecewise", "full"]
Fallback = Literal["error", "eager"]
KVCacheDtype = Literal["auto", "fp8"]
Fp8Weights = Literal["dequantise", "keep"]
StoredWeights = Literal["plain", "fp8", "fp8-blocks"]
"""The storage of a random head's matrices: in its dtype; as FP8 with a scale per row; or with a scale per row and 128
columns. Embedding and lm_head are never FP8, as in checkpoints."""
DrafterShape = Literal[
    "eagle3-tiny-python", "eagle3-tiny-128", "eagle3-llama3-8b", "eagle3-qwen3-8b", "eagle3-llama3-70b",
    "eagle1-llama3-8b", "mtp-7b", "mtp-glm-4.5-air", "dflash-qwen3-8b", "dspark-qwen3-8b", "dflash2-qwen3-8b",
    "domino-qwen3-8b",
]  # fmt: skip
"""The shapes of drafters with random weights, `specgraph.tools.shapes.SHAPES`."""
RandomTarget = Literal["llama3-8b", "qwen3-8b", "tiny-python"]
"""Targets with random weights, `specgraph.tools.rounds.TARGETS`."""
DraftSampling = Literal["sampled", "greedy"]
BlockCount = Annotated[int, Range(2, (1 << 31) - 1)]
RoundsAhead = Annotated[int, Range(0, 1)]
DraftCount = Annotated[int, Range(1, 63)]
"""K: a verify has K + 1 rows per request, at most `MAX_TREE_LEN` as a tree's."""
Schedule = Mapping[Requests, Annotated[int, Range(0, 63)] | Literal["tree"]]
VerifiedDrafts = Annotated[
    Positive | None,
    Gone("auto", "no run on a GPU showed that choosing the number pays; give the number, such as 2.5, or leave it out"),
]
RoundTimes = Mapping[Requests, Mapping[DraftCount, Positive]]
"""Microseconds of one round (verify of K drafts and propose of K): {padded requests: {K: time}}."""


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


def _whole_or_auto(text: str) -> int | Literal["auto"]:
    try:
        return "auto" if text == "auto" else int(text)
    except ValueError:
        raise ValueError("give a whole number, or auto") from None


def _number(text: str) -> float | str:
    """Return the number; a text that is none is refused with the field's own message."""
    try:
        return float(text)
    except ValueError:
        return text


def _times(text: str) -> dict[int, dict[int, float]]:
    try:
        table = json.loads(Path(text).read_text(encoding="utf-8"))
        table = table.get("round_times", table)
        return {int(size): {int(k): float(time) for k, time in times.items()} for size, times in table.items()}
    except OSError as error:
        raise ValueError(f"the file can't be read: {error.strerror}") from None
    except (ValueError, AttributeError, TypeError):
        raise ValueError("the file is no JSON object {requests: {K: microseconds}}") from None


def _schedule(text: str) -> dict[int, int | Literal["tree"]]:
    parts = [part.partition(":") for part in text.split(",")]
    try:
        return {int(limit): "tree" if drafts == "tree" else int(drafts) for limit, _, drafts in parts}
    except ValueError:
        raise ValueError("give REQUESTS:K or REQUESTS:tree, comma-separated, such as 4:5,16:3") from None


def parse_acceptance(text: str) -> float | tuple[float, ...]:
    """Return `synthetic_acceptance` as the commands write it; ValueError if it is not that."""
    try:
        shares = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError("give a rate (0.7), or one share per position (0.8,0.6,0.5)") from None
    return shares[0] if len(shares) == 1 else shares


@dataclass(frozen=True, kw_only=True)
class RunnerOptions:
    """Options of whatever captures and runs the programs of a model."""

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


@dataclass(frozen=True, kw_only=True)
class DraftOptions(RunnerOptions):
    """Options of a drafter."""

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
    most likely tokens. The output has the target's distribution either way (`ops.verify_drafts`); which is accepted
    more often depends on the pair. The tokens of a tree are always the most likely ones."""


@dataclass(frozen=True, kw_only=True)
class DecoderOptions(DraftOptions):
    """Options of a target with its drafter."""

    num_blocks: BlockCount | None = option(
        None, "KV blocks of each cache, one of them the null block. Default: what the batch needs and memory allows."
    )
    kv_cache_dtype: KVCacheDtype = option(
        "auto", "KV caches: auto (the model's dtype) or fp8 (e4m3, half the memory of bfloat16; not lossless)."
    )
    """Its scales are 1. `load_generator` refuses folders that have others, which `load_target` ignores."""
    rounds_ahead: RoundsAhead = option(1, "Rounds launched before the last one's tokens are read, 0 or 1.")
    """Attention with host parameters takes 0, because it needs the accepted counts."""
    synthetic_acceptance: Share | Sequence[Share] | None = option(
        None,
        "For speed tests; the text is not the target's then: accept drafts by chance, one rate or a share per place.",
        parse=parse_acceptance,
    )
    """A number is the chance that a draft token is accepted when all before it are; a list gives, for each of the K
    positions, the share of drafts accepted there."""
    round_times: RoundTimes | None = option(
        None,
        "With -k auto: a JSON file with the times to choose by, {requests: {K: microseconds}}, or a report of explain. "
        "Default: measured.",
        parse=_times,
    )
    """The choice of K by a given table follows from nothing but the tokens."""
    verified_drafts: VerifiedDrafts = option(
        None,
        "Draft tokens that a verify takes per request on average: those likeliest accepted, by the drafter's "
        "confidence; below K. Default: all.",
        parse=_number,
    )
    """Needs a drafter with confidence (DSpark), and attention with device lengths."""
    sampling_parameters: bool = option(False, "Allow top_k, top_p, min_p, penalties and logit_bias in requests.")
    logprobs: bool = option(False, "Give the log-probability of each generated token.")
    """It is under the target's own distribution, before all parameters."""


@checked_fields
@dataclass(frozen=True, kw_only=True)
class EngineOptions(DecoderOptions):
    """Options of loading, capturing and running a pair. Each field is a keyword argument of `load_generator`.

    Raises:
        ConfigError: an option has no such value; those that contradict each other are refused where they are used,
            before any device work.
    """

    num_speculative_tokens: DraftCount | Literal["auto"] = option(
        5,
        "Draft tokens per propose, K; auto follows acceptance.",
        "-k",
        "--num-speculative-tokens",
        parse=_whole_or_auto,
    )
    num_modules: Count | None = option(None, "MTP modules to use; 1 reuses the first at every step. Default: all.")
    prompt_lookup_max: NgramTokens = option(5, "Draft ngram: tokens of the longest n-gram that is looked for.")
    prompt_lookup_min: NgramTokens = option(1, "Draft ngram: tokens of the shortest n-gram that is looked for.")
    speculative_num_steps: Count | None = option(
        None,
        "Draft trees instead of chains: steps, the depth of the tree. Give all three --speculative options; with "
        "--draft-schedule, trees are for the batches that it says.",
    )
    speculative_eagle_topk: Count | None = option(
        None, "Draft trees: tokens that follow each node, and nodes that each step expands."
    )
    speculative_num_draft_tokens: Count | None = option(
        None, "Draft trees: rows per request in a verify, the last token and the best nodes of the tree."
    )
    max_model_len: ModelLen | None = option(
        None, "Tokens of the longest request, prompt and output together. Default: the target's maximum."
    )
    block_size: Tokens | None = option(None, "Tokens per KV block. Default: what the attention prefers.")
    kv_memory: Positive | None = option(None, "GiB for all KV caches together. Default: by --memory-fraction.")
    memory_fraction: Annotated[float, Range(1e-9, 1)] = option(
        0.9, "Share of the memory free after loading that the KV caches may take."
    )
    attention: str = option(
        "auto", "Where attention reads sequence lengths from (device or host), or a backend's own attention by name."
    )
    dtype: DType = option(
        None,
        "Of weights and activations: float32, float16 or bfloat16. Default: the target's; on cpu float32, or "
        "bfloat16 for a bfloat16 target where the CPU multiplies it.",
        parse=str,
    )
    fp8_weights: Fp8Weights = option(
        "dequantise", "Matrices stored as FP8: dequantise them at load, or keep them: half the memory of bfloat16."
    )
    tensor_parallel: Count = option(1, "Ranks that split the target's and the drafter's matrices; start with torchrun.")
    draft_tensor_parallel: Count | None = option(
        None, "Ranks that split the drafter: as the target's by default, or 1 for a whole drafter on every rank."
    )
    data_parallel: Count = option(
        1, "Groups of ranks with requests of their own that share the experts; with --enable-expert-parallel."
    )
    enable_expert_parallel: bool = option(
        False, "Deal the experts of a mixture out to the ranks, whole, instead of splitting each like other matrices."
    )
    decode_context_parallel: Count = option(
        1, "Tensor parallel ranks that each keep a part of every request's KV; a divisor of --tensor-parallel."
    )
    rank_timeout: Positive = option(600.0, "Seconds that a rank waits for another before all end with an error.")

    def __post_init__(self) -> None:
        if self.dtype is not None and not (isinstance(self.dtype, str) and self.dtype in DTYPES):
            dtype_named(self.dtype)  # not asked of a name: torch takes long to import
        check_ngrams(self.prompt_lookup_max, self.prompt_lookup_min)
        size, draft = self.tensor_parallel, self.draft_tensor_parallel
        check_layout(size, self.data_parallel, self.enable_expert_parallel, self.decode_context_parallel)
        if draft not in (None, 1, size):
            raise ConfigError(
                f"tensor_parallel {size}, draft_tensor_parallel {draft}: the target is split over 1 or more ranks, the "
                "drafter over as many or over 1"
            )
        if self.k_candidates is not None and self.num_speculative_tokens != "auto":
            raise ConfigError("k_candidates are for num_speculative_tokens='auto' (-k auto)")
        _ = self.draft_tree

    @property
    def draft_tree(self) -> DraftTree | None:
        """Return the draft trees asked for, None for chains; ConfigError for numbers missing or out of range."""
        names = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
        given: dict[str, int | None] = {name: getattr(self, name) for name in names}
        missing = [name for name, value in given.items() if value is None]
        if len(missing) == len(names):
            return None
        if missing:
            raise ConfigError(f"a draft tree needs {', '.join(names)}; missing: {', '.join(missing)}")
        steps, top_k, tokens = (int(value) for value in given.values() if value is not None)
        return DraftTree(num_steps=steps, top_k=top_k, num_draft_tokens=tokens)


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


MIN_TEMPERATURE = 1e-5
"""Below it logits / temperature may leave float32, and the distribution is one-hot anyway."""


def check_temperature(temperature: float) -> None:
    """Raise ConfigError for a temperature above 0 and below MIN_TEMPERATURE: logits can't be divided by it."""
    if 0 < temperature < MIN_TEMPERATURE:
        raise ConfigError(f"temperature must be 0 (greedy) or at least {MIN_TEMPERATURE}, got {temperature}")


@checked
def check_num_sequences(n: Requests, temperature: float) -> None:
    """Raise ConfigError for less than 1 sequence per prompt, or more than 1 at temperature 0."""
    if n > 1 and temperature == 0:
        raise ConfigError(f"n {n} needs a temperature above 0: greedy sequences of one prompt are all the same")


def device_named(device: torch.device | str) -> torch.device:
    """Return the torch device of that name; ConfigError where this machine has none."""
    import torch

    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"no device {shown(str(device))}: {first_line(error)}") from None


def dtype_named(dtype: DType) -> torch.dtype | None:
    """Return the torch dtype of that name; a dtype and None pass through. ConfigError for one that no model runs in."""
    unknown = ConfigError(f"unknown dtype {shown(dtype)}; there are {', '.join(DTYPES)}")
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise unknown  # before torch is imported, which takes long
    import torch

    if dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1):
        return dtype
    if not isinstance(dtype, str):
        raise unknown
    return getattr(torch, dtype)
