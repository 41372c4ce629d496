"""The options of `generate` that speculative decoding serves. All others are refused before any pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import (
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specgraph.errors import ConfigError, UnsupportedError
from specgraph_transformers.kv_rows import check_cache

ROW_PROCESSORS = (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    MinPLogitsWarper,
    SuppressTokensLogitsProcessor,
)
"""Logits processors that read one row of logits only. They process all rows of a verify at once."""
PREFIX_PROCESSORS = (
    RepetitionPenaltyLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    SequenceBiasLogitsProcessor,
)
"""Logits processors that read one row of logits and the tokens before it. They process one row at a time."""

MODEL_INPUTS = {"attention_mask", "position_ids", "cache", "use_cache", "logits_to_keep"}
"""The model inputs that `generate` passes for a text prompt."""

DROPPED = {
    "assistant_model": "the drafter drafts",
    "synced_gpus": "a verify has no step per token that the ranks could take together",
}
"""Arguments that `generate` drops if it has a `custom_generate`, each with the reason why it has no meaning here."""

OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


def check_supported(
    model: Any,
    input_ids: Tensor,
    processors: Sequence[Any],
    config: Any,
    model_inputs: Mapping[str, Any],
    given: Mapping[str, Any],
) -> None:
    """Refuse a call if its output could not be exactly that of `generate`.

    Args:
        processors: the logits processors that `generate` made.
        config: the generation config that `generate` prepared.
        model_inputs: the model inputs that `generate` prepared, besides input_ids.
        given: the arguments of `generate`. Some of them are in no other argument here.

    Raises:
        UnsupportedError: an option, a logits processor, the kind of model or the cache is not supported. The message
            names it.
    """
    if model.config.is_encoder_decoder:
        raise UnsupportedError(f"{type(model).__name__} is an encoder-decoder model; drafters are for causal models")
    for name, why in DROPPED.items():
        if given.get(name):
            raise UnsupportedError(f"{name} beside custom_generate is not supported: {why}; leave it out")
    if config.is_assistant:
        raise UnsupportedError("is_assistant=True is not supported: the model is the target of a drafter here")
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise UnsupportedError(f"generation mode '{mode.value}': speculative decoding is greedy or sampled, one beam")
    for processor in processors:
        if type(processor) not in (*ROW_PROCESSORS, *PREFIX_PROCESSORS):
            known = ", ".join(kind.__name__ for kind in (*ROW_PROCESSORS, *PREFIX_PROCESSORS))
            raise UnsupportedError(f"logits processor {type(processor).__name__} is not supported; {known} are")
    for name in OUTPUTS:
        if config.return_dict_in_generate and getattr(config, name):
            raise UnsupportedError(f"{name}=True is not supported: a verify has no step per token")
    if config.prefill_chunk_size is not None:
        raise UnsupportedError(f"prefill_chunk_size={config.prefill_chunk_size} is not supported; leave it out")
    if not model_inputs.get("use_cache") or model_inputs.get("cache") is None:
        raise UnsupportedError("speculative decoding needs use_cache=True and a model with a DynamicCache")
    for name, value in model_inputs.items():
        if name not in MODEL_INPUTS and value is not None:
            raise UnsupportedError(f"model input '{name}' is not supported: prompts are token ids")
    cache = model_inputs["cache"]
    check_cache(cache, input_ids.shape[0])
    if cache.get_seq_length():
        raise UnsupportedError(
            f"cache holds {cache.get_seq_length()} tokens already, and the drafter needs the hidden states "
            "of the whole prompt: pass all of it, and no cache"
        )


def prompt_lengths(input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None) -> list[int]:
    """Return the number of tokens in each prompt, without padding.

    Args:
        input_ids: int64 [n, P].
        attention_mask: [n, P] of 0 and 1. None if no prompt is padded.
        position_ids: [n, P] or [1, P], from `generate`. None for a model without them.

    Raises:
        ConfigError: a prompt is empty, has padding that is not on the left, or has positions that do not count its
            tokens.
    """
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.to(input_ids)
    if not ((mask == 0) | (mask == 1)).all() or (mask.diff(dim=-1) < 0).any() or (mask[:, -1] == 0).any():
        raise ConfigError(
            "attention_mask is not 0 for padding on the left and then 1 for every token of the prompt: pad on the left "
            "(tokenizer.padding_side='left'), and give no empty prompt"
        )
    if position_ids is not None:
        expected = (mask.cumsum(dim=-1) - 1).clamp(min=0)
        if position_ids.dim() != 2 or ((position_ids.to(mask) != expected) & (mask == 1)).any():
            raise ConfigError("position_ids do not count the tokens of each prompt from 0; leave them out")
    return [int(length) for length in mask.sum(dim=-1).tolist()]
