"""A plugin's settings, and the configurations of vLLM that it serves, checked before any device work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch

from specgraph.errors import ConfigError
from specgraph.validation import Range, Requests, checked_fields

WhenUnsupported = Literal["refuse", "vllm"]

KEY = "specgraph"
"""The plugin's key in `--additional-config`."""


@checked_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The plugin's settings: `--additional-config '{"specgraph": {...}}'`. Without the key the plugin does nothing.

    Raises:
        ConfigError: a value is not allowed.
    """

    when_unsupported: WhenUnsupported = "refuse"
    """The answer to a configuration that the plugin does not serve. "refuse" raises at start-up; "vllm" logs the reason
    and leaves drafting to vLLM."""
    capture_sizes: Sequence[Requests] | None = None
    """Numbers of requests to capture; by default a ladder up to vLLM's max_num_seqs. A larger batch goes to vLLM."""
    log_every: Annotated[int, Range(0)] = 10_000
    """Proposes between two log lines with `ProposeCounts.by_reason`. 0 never logs them."""
    compare_every: Annotated[int, Range(0)] = 1000
    """With tensor parallel, the proposes between two comparisons of the ranks' tokens. 0 compares at start-up only."""
    draft_vocab: str | None = None
    """A file of the tokens that the drafter may draft (`specgraph draft-vocab`, a token map of SGLang, or `.npy`). The
    drafter then has a copy of their rows of vLLM's lm_head. None for all tokens."""


def read_settings(additional_config: Any) -> Settings | None:
    """Return the settings in vLLM's `additional_config`. None if it has no key "specgraph".

    Raises:
        ConfigError: the key's value is not a mapping, has unknown keys, or has a value that is not allowed.
    """
    if not isinstance(additional_config, Mapping) or KEY not in additional_config:
        return None
    given: Any = additional_config[KEY]
    if not isinstance(given, Mapping):
        raise ConfigError(f"additional_config['{KEY}'] is {given!r}; it is a mapping, and {{}} takes all defaults")
    try:
        return Settings(**given)
    except ConfigError as error:
        raise ConfigError(f"additional_config['{KEY}']: {error}") from None


FP8_CACHES = ("fp8", "fp8_e4m3")
"""The values of `kv_cache_dtype` that mean e4m3."""

METHODS = ("eagle3", "eagle", "mtp", "dflash", "dspark", "draft_model")
"""The served speculative methods. vLLM's V2 model runner must have them, too."""


def predicts_at_anchor(drafter: Any) -> bool:
    """Return True if a DSpark drafter predicts a token at the row of the last token.

    Args:
        drafter: the drafter's Hugging Face configuration.
    """
    fills_in = getattr(drafter, "dspark_bonus_anchor", False)  # vLLM 0.26 has only this name
    return bool(getattr(drafter, "sample_from_anchor", not fills_in))


def unsupported_config(config: Any, graphs: Any, methods: Sequence[str] = METHODS) -> str | None:
    """Return in one line why a plugin does not serve a `VllmConfig`. None if it does.

    Args:
        graphs: the configuration's mode of graphs. Its name is NONE if vLLM captures none.
        methods: the speculative methods that the plugin serves.
    """
    speculative, parallel = config.speculative_config, config.parallel_config
    model, cache = config.model_config, config.cache_config
    if speculative.method not in methods:
        return f"speculative method '{speculative.method}'; specgraph drafts for {', '.join(methods)}"
    for name in ("use_gemma4_mtp", "use_multi_module_mtp"):  # vLLM then has another speculator
        if (asked := getattr(speculative, name, None)) is not None and asked():
            return f"speculative method '{speculative.method}' with several modules, or Gemma 4's ({name})"
    for name in ("parallel_drafting", "use_heterogeneous_vocab", "enable_adaptive_verification"):
        in_parallel = name == "parallel_drafting" and speculative.method in ("dflash", "dspark")
        if getattr(speculative, name, False) and not in_parallel:
            return f"speculative option {name}"
    fills_in = speculative.method == "dspark" and not predicts_at_anchor(speculative.draft_model_config.hf_config)
    if fills_in and getattr(config, "num_lookahead_tokens", 0) <= speculative.num_speculative_tokens:  # vLLM 0.26
        return "a DSpark drafter with sample_from_anchor false: this vLLM reserves no KV slot for its last row"
    for name in (
        "pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size",
    ):  # fmt: skip
        if (size := getattr(parallel, name, 1)) != 1:
            return f"{name} {size}; one GPU is served, or several by tensor parallel"
    if (size := getattr(speculative, "draft_tensor_parallel_size", None)) not in (None, parallel.tensor_parallel_size):
        return f"draft_tensor_parallel_size {size}; the drafter is split as the target is"
    if getattr(parallel, "enable_eplb", False) and speculative.method == "mtp":  # only MTP has a mixture
        return "enable_eplb with method 'mtp': experts that move between the ranks while the engine runs are not served"
    if model.dtype not in (torch.bfloat16, torch.float16):
        return f"dtype {str(model.dtype).removeprefix('torch.')}; bfloat16 and float16 are served"
    served = (None, "auto", str(model.dtype).removeprefix("torch."), *FP8_CACHES)
    for dtype in (cache.cache_dtype, getattr(speculative, "kv_cache_dtype", None)):
        if dtype not in served:
            return f"kv_cache_dtype '{dtype}'; the KV cache has the model's dtype, or {' or '.join(FP8_CACHES)}"
    if getattr(cache, "calculate_kv_scales", False):
        return "calculate_kv_scales; an FP8 KV cache has scales of 1"
    if model.enforce_eager or getattr(graphs, "name", "") == "NONE":
        return "enforce_eager, or a mode of graphs NONE: vLLM then captures nothing at start-up, and specgraph must"
    if getattr(config, "watermark_config", None) is not None:
        return "watermark_config: vLLM draws watermarked drafts, and specgraph's would have no watermark"
    if getattr(config, "kv_transfer_config", None) is not None:
        return "kv_transfer_config: a KV connector transfers around vLLM's attention, and specgraph drafts without it"
    return None
