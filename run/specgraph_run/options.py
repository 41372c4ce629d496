"""Options of loading and running a pair, for `load_generator` and the commands. Those of a drafter are fields of the
core's `DraftOptions`; `DRAFT_OPTIONS` says how commands take them.

Three fields of `GeneratorOptions` may be left open: num_speculative_tokens, max_model_len and block_size. `DraftConfig`
has fields of the same names with the final numbers.

Importing this module does not import torch, so that `specgraph --help` is fast.
"""
# ruff: noqa: RUF009

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from specgraph_models.names import DTYPES, DType, dtype_named

from specgraph.config import DraftCount, DraftOptions, DraftTree, check_ngrams
from specgraph.errors import ConfigError
from specgraph.validation import (
    Count,
    Gone,
    ModelLen,
    NgramTokens,
    Positive,
    Range,
    Requests,
    Tokens,
    checked,
    checked_fields,
)

NGRAM = Path("ngram")
"""Given instead of a drafter's folder: drafts come from an `NgramHead`, which has no folder."""
KVCacheDtype = Literal["auto", "fp8"]
Fp8Weights = Literal["dequantise", "keep"]
StoredWeights = Literal["plain", "fp8", "fp8-blocks"]
"""The storage of a random head's matrices: its own dtype, FP8 with a scale per row, or FP8 with a scale per row and 128
columns. Embedding and lm_head are never FP8, as in checkpoints."""
DrafterShape = Literal[
    "eagle3-tiny-python", "eagle3-tiny-128", "eagle3-llama3-8b", "eagle3-qwen3-8b", "eagle3-llama3-70b",
    "eagle1-llama3-8b", "mtp-7b", "mtp-qwen3.5-27b", "mtp-glm-4.5-air", "dflash-qwen3-8b", "dspark-qwen3-8b",
    "dflash2-qwen3-8b", "domino-qwen3-8b",
]  # fmt: skip
"""The shapes of drafters with random weights; see `specgraph_run.tools.shapes.SHAPES`."""
RandomTarget = Literal["llama3-8b", "qwen3-8b", "tiny-python"]
"""Targets with random weights; see `specgraph_run.tools.rounds.TARGETS`."""
Share = Annotated[float, Range(0, 1)]
Temperature = Annotated[float, Range(0, 1e6)]
TopK = Annotated[int, Range(0, 1 << 31)]
TopP = Annotated[float, Range(1e-6, 1)]
RepetitionPenalty = Annotated[float, Range(1e-3, 1e3)]
Penalty = Annotated[float, Range(-1e3, 1e3)]
BlockCount = Annotated[int, Range(2, (1 << 31) - 1)]
RoundsAhead = Annotated[int, Range(0, 1)]
VerifiedDrafts = Annotated[
    Positive | None,
    Gone("auto", "no run on a GPU showed that choosing the number pays; give the number, such as 2.5, or leave it out"),
]
RoundTimes = Mapping[Requests, Mapping[DraftCount, Positive]]
"""Microseconds of one round, a propose of K drafts and their verify: {padded requests: {K: time}}."""


def described(text: str, *flags: str, parse: Callable[[str], Any] | None = None) -> dict[str, Any]:
    """Return the metadata of an option of the commands.

    Args:
        text: one sentence for `--help`.
        flags: `--` and the field's name by default.
        parse: turns the command line's text into the field's value, or raises ValueError.
    """
    return {"help": text, "flags": flags, "parse": parse}


def option(default: Any, text: str, *flags: str, parse: Callable[[str], Any] | None = None) -> Any:
    """Return a dataclass field that is also an option of the commands. Arguments as in `described`."""
    return field(default=default, metadata=described(text, *flags, parse=parse))


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


DRAFT_OPTIONS = {
    "max_num_requests": described("Requests in the largest batch."),
    "capture_sizes": described(
        "Batch sizes to capture, comma-separated. Default: a ladder up to max_num_requests.", parse=_integers
    ),
    "prefill_sizes": described(
        "Rows of prefill passes to capture, comma-separated. Default: up to 512, on cpu 128.", parse=_integers
    ),
    "decode": described("How the draft loop becomes graph launches.", parse=str.lower),
    "prefill": described("How prompts run: op by op, from graphs between attention calls, or as one graph per pass."),
    "fallback": described("What happens to a batch larger than every captured size."),
    "check_inputs": described("Compare the addresses of all tensors that a graph reads before every replay."),
    "debug": described("Check the values of every batch before it is drafted for; waits for the device."),
    "k_candidates": described("With -k auto: K to choose from, comma-separated. Default: 1,2,3,5.", parse=_integers),
    "draft_schedule": described(
        "K by batch size: 4:5,16:3 drafts 5 tokens for up to 4 requests, 3 for up to 16. 4:tree,16:3 drafts trees, "
        "of the three --speculative options, for up to 4.",
        parse=_schedule,
    ),
    "sampled": described("Allow temperatures above 0."),
    "draft_sampling": described(
        "Drafts of requests above temperature 0: drawn by temperature too, or greedy. Lossless either way."
    ),
}
"""The options of `DraftOptions` in commands, by the name of the field."""


def metadata_of(each: Field[Any]) -> Mapping[str, Any]:
    """Return the metadata of a field as `described` makes it. Empty if the field is no option of the commands."""
    return each.metadata or DRAFT_OPTIONS.get(each.name, {})


def _whole_or_auto(text: str) -> int | Literal["auto"]:
    try:
        return "auto" if text == "auto" else int(text)
    except ValueError:
        raise ValueError("give a whole number, or auto") from None


def _number(text: str) -> float | str:
    """Return the number. A text that is not a number is returned as it is: the field's check then refuses it."""
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


def parse_acceptance(text: str) -> float | tuple[float, ...]:
    """Parse `synthetic_acceptance` from a command line. Raises ValueError if the text is not numbers with commas."""
    try:
        shares = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError("give a rate (0.7), or one share per position (0.8,0.6,0.5)") from None
    return shares[0] if len(shares) == 1 else shares


def check_layout(tensor_parallel: int, data_parallel: int, expert_parallel: bool, decode_context_parallel: int) -> None:
    """Raise ConfigError if data parallel ranks share nothing, or if `decode_context_parallel` does not divide
    `tensor_parallel`.
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


@checked_fields
@dataclass(frozen=True, kw_only=True)
class DecoderOptions:
    """Options of a decoder that a drafter alone does not have.

    Raises:
        ConfigError: a number is out of range, or an option has no such value.
    """

    num_blocks: BlockCount | None = option(
        None, "KV blocks of each cache, one of them the null block. Default: what the batch needs and memory allows."
    )
    """A `SpeculativeDecoder` with None allocates enough for the largest batch."""
    kv_cache_dtype: KVCacheDtype = option(
        "auto", "KV caches: auto (the model's dtype) or fp8 (e4m3, half the memory of bfloat16; not lossless)."
    )
    """An FP8 cache has scales of 1. `load_generator` refuses folders with other scales; `load_target` ignores them."""
    rounds_ahead: RoundsAhead = option(1, "Rounds launched before the last one's tokens are read, 0 or 1.")
    """The decoder takes 0 if attention needs host parameters, which follow from the accepted counts. It also takes 0 if
    data parallel ranks agree on each round."""
    synthetic_acceptance: Share | Sequence[Share] | None = option(
        None,
        "For speed tests; the text is not the target's then: accept drafts by chance, one rate or a share per place.",
        parse=parse_acceptance,
    )
    """A number is the chance that a draft token is accepted if all before it are. A list has, for each of the K
    positions, the share of drafts that are accepted there."""
    round_times: RoundTimes | None = option(
        None,
        "With -k auto: a JSON file with the times to choose by, {requests: {K: microseconds}}, or a report of explain. "
        "Default: measured.",
        parse=_times,
    )
    """If the times are given, the choice of K depends on the tokens alone."""
    verified_drafts: VerifiedDrafts = option(
        None,
        "Draft tokens that a verify takes per request on average: those likeliest accepted, by the drafter's "
        "confidence; below K. Default: all.",
        parse=_number,
    )
    """It needs a drafter with confidence (DSpark), and attention with device lengths."""
    sampling_parameters: bool = option(False, "Allow top_k, top_p, min_p, penalties and logit_bias in requests.")
    logprobs: bool = option(False, "Give the log-probability of each generated token.")
    """The log-probability is under the target's own distribution, before any sampling parameter."""

    def __post_init__(self) -> None:
        for name in ("sampling_parameters", "logprobs"):
            if getattr(self, name) and self.synthetic_acceptance is not None:
                raise ConfigError(
                    f"{name} is about the target's tokens, and with synthetic_acceptance the output is not the "
                    f"target's: leave out one of the two"
                )


@checked_fields
@dataclass(frozen=True, kw_only=True)
class GeneratorOptions(DecoderOptions, DraftOptions):
    """Options of loading, capturing and running a pair. Each field is a keyword argument of `load_generator`.

    Raises:
        ConfigError: an option has no such value. Options that contradict each other are refused when they are used,
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
    draft_vocab: Path | str | None = option(
        None,
        "A file of the tokens that the drafter may draft (specgraph draft-vocab, a token map of SGLang, .npy): a "
        "propose then reads their rows of the lm_head alone. Default: all tokens.",
        parse=str,
    )
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
        DecoderOptions.__post_init__(self)
        if self.dtype is not None and not (isinstance(self.dtype, str) and self.dtype in DTYPES):
            dtype_named(self.dtype)  # not called for a known name: torch takes long to import
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
        """The shape of draft trees. None for chains. Raises ConfigError if a number is missing or out of range."""
        names = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
        given: dict[str, int | None] = {name: getattr(self, name) for name in names}
        missing = [name for name, value in given.items() if value is None]
        if len(missing) == len(names):
            return None
        if missing:
            raise ConfigError(f"a draft tree needs {', '.join(names)}; missing: {', '.join(missing)}")
        steps, top_k, tokens = (int(value) for value in given.values() if value is not None)
        return DraftTree(num_steps=steps, top_k=top_k, num_draft_tokens=tokens)


MIN_TEMPERATURE = 1e-5
"""The least temperature above 0. Below it logits / temperature may overflow float32, and one token has all the
probability anyway."""


def check_temperature(temperature: float) -> None:
    """Raise ConfigError if a temperature is above 0 and below MIN_TEMPERATURE: logits can't be divided by it."""
    if 0 < temperature < MIN_TEMPERATURE:
        raise ConfigError(f"temperature must be 0 (greedy) or at least {MIN_TEMPERATURE}, got {temperature}")


@checked
def check_num_sequences(n: Requests, temperature: float) -> None:
    """Raise ConfigError if n is less than 1, or more than 1 at temperature 0."""
    if n > 1 and temperature == 0:
        raise ConfigError(f"n {n} needs a temperature above 0: greedy sequences of one prompt are all the same")
