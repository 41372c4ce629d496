"""`config.json` as typed values. Each key has a type and a range, and no unknown key is dropped in silence.

A key that is missing, of the wrong type or out of range raises a CheckpointError that names the key and the file.
Every key that a reader takes is remembered, so that `check_keys` finds the keys that no reader took.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specgraph.validation import Range
from specgraph_models.checkpoints.files import checked_folder, exists, listed, read_json, shown
from specgraph_models.checkpoints.gguf_file import is_gguf, json_of
from specgraph_models.errors import CheckpointError

_LOG = logging.getLogger("specgraph")


RANGES: Mapping[str, Range] = {
    key: Range(low, high)
    for low, high, keys in (
        (1, 1 << 24, "vocab_size draft_vocab_size"),
        (0, 1 << 24, "mask_token_id ptd_token_id"),
        (1, 1 << 18, "hidden_size target_hidden_size"),
        (1, 1 << 22, "intermediate_size"),
        (1, 1 << 20, "moe_intermediate_size shared_expert_intermediate_size"),
        (1, 1 << 16, "kv_lora_rank q_lora_rank index_topk"),
        # heads
        (1, 1 << 14, "num_attention_heads num_key_value_heads"),
        (2, 4096, "head_dim qk_rope_head_dim rotary_dim"),
        (1, 4096, "qk_nope_head_dim v_head_dim"),
        (1, 1 << 14, "linear_num_key_heads linear_num_value_heads"),
        (1, 1024, "linear_key_head_dim linear_value_head_dim"),
        (2, 64, "linear_conv_kernel_dim"),
        # layers, and the periods in which their kind changes
        (1, 4096, "num_hidden_layers num_target_layers decoder_sparse_step"),
        (1, 4096, "sliding_window_pattern"),
        (1, 4096, "full_attention_interval"),
        (0, 4096, "first_k_dense_replace"),
        (0, 1 << 20, "max_window_layers"),
        # experts
        (1, 4096, "num_experts num_local_experts n_routed_experts"),
        (1, 256, "num_experts_per_tok n_group topk_group"),
        (0, 64, "n_shared_experts num_nextn_predict_layers num_mtp_layers mtp_num_hidden_layers"),
        # positions, and tokens of a draft
        (1, 1 << 40, "max_position_embeddings original_max_position_embeddings"),
        (1, 1 << 62, "sliding_window"),
        (2, 1024, "block_size"),
        (1, 1024, "speculative_tokens"),
        # numbers
        (1e-12, 1.0, "rms_norm_eps"),
        (1.0, 1e12, "rope_theta rope_local_base_freq"),
        (1.0, 1e6, "factor"),
        (1e-3, 1.0, "partial_rotary_factor"),
        (0, 1e3, "llama_4_scaling_beta"),
        (0, 1e3, "mscale mscale_all_dim"),
        (1e-3, 1e3, "attention_factor attn_factor routed_scaling_factor swiglu_alpha"),
        (1e-3, 1e4, "swiglu_limit"),
        (1e-3, 1e6, "low_freq_factor high_freq_factor beta_fast beta_slow short_factor long_factor"),
        (1e-3, 1e6, "query_pre_attn_scalar"),
    )
    for key in keys.split()
}
"""The integers and numbers that several readers take, with their ranges; a reader gives the range of a key of its own.
A range is wide enough for any model published so far. It is narrow enough that a mistyped size makes no huge table, and
no frequency becomes infinite."""

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    key: values
    for values, keys in (
        # mixtures of experts, latent attention, limits on logits; position encodings
        ((0, False), "num_local_experts num_experts n_routed_experts num_experts_per_tok kv_lora_rank q_lora_rank"),
        ((0, False), "attn_logit_softcapping final_logit_softcapping logit_softcap clip_qkv attention_chunk_size"),
        ((0, [], {}), "no_rope_layers no_rope_layer_interval pruned_heads chunk_size_feed_forward mlp_only_layers"),
        ((0, [], {}), "per_layer_config"),
        ((1,), "logit_scale logits_scaling embedding_multiplier residual_multiplier scale_emb partial_rotary_factor"),
        ((1,), "rotary_pct rotary_percent parallel_draft_step input_embedding_scale output_multiplier"),
        ((1,), "attention_value_scale"),
        # rows that see later rows; DFlash: another pairing of rotated elements, a corrected block
        ((True,), "is_causal is_neox_style rope_is_neox_style"),
        (("dflash",), "projector_type"),
        ((False,), "is_encoder_decoder add_cross_attention use_mrope alibi qk_layernorm use_qk_norm parallel_attn"),
        ((False,), "use_parallel_residual rope_interleaved"),
        ((False,), "use_bidirectional_attention layer_scale mtp_use_dedicated_embeddings mtp_hidden_states_first"),
        ((False,), "use_gemma_norm attention_sink_bias add_swa_attention_sink_bias use_aux_norm dspark_bonus_anchor"),
        ((), "attention_multiplier query_pre_attn_scalar scale_depth text_config vision_config audio_config"),
        # PARD and P-EAGLE predict several tokens per pass, from mask tokens; P-EAGLE's reader takes its own keys
        ((False,), "parallel_drafting"),
        ((), "ptd_token_id pard_token spd_type"),
    )
    for key in keys.split()
}
"""Keys that change a model's computation in ways that no model here has, with the values that leave it unchanged. Null
always does. A folder with another value is refused."""

_HARMLESS = """
    architectures attention_dropout auto_map bos_token_id dtype embd_pdrop embed_requires_grad eos_token_id
    has_no_defaults_at_init id2label initializer_range is_llama_config label2id max_window_layers model_type
    mtp_num_hidden_layers name_or_path num_mtp_layers num_nextn_predict_layers output_attentions
    output_hidden_states output_router_logits pad_token_id pretraining_tp problem_type resid_pdrop return_dict
    router_aux_loss_coef sliding_window sliding_window_non_causal speculators_version tie_word_embeddings
    tokenizer_class torch_dtype torchscript transformer_layer_architecture transformers_version unk_token_id
    use_cache use_sliding_window
"""
HARMLESS = frozenset(_HARMLESS.split())
"""Keys at a configuration's top level that may be left unread. They don't change the computation of a model of a known
architecture, or they count only together with another key that a reader takes."""


@dataclass(frozen=True, slots=True)
class ConfigSource:
    """The key-value pairs of one configuration, and the file (and section) that they came from."""

    values: Mapping[str, Any]
    name: str
    """The file's path, and the section within it, for messages."""
    taken: set[str] = field(default_factory=set[str])
    """The keys that a reader has taken."""
    sections: dict[str, ConfigSource] = field(default_factory=dict[str, "ConfigSource"])

    def fail(self, key: str, problem: str) -> CheckpointError:
        """Return the error to raise about `key`."""
        return CheckpointError(f"{self.name}: {key!r} {problem}")

    def has(self, key: str) -> bool:
        """Return True if `key` is present and not null."""
        return self.values.get(key) is not None

    def take(self, key: str) -> Any:
        """Return the value of `key` as it is. None if absent."""
        self.taken.add(key)
        return self.values.get(key)

    def section(self, key: str) -> ConfigSource:
        """Return the mapping under `key`. Empty if absent."""
        value = self.take(key)
        if key not in self.sections:
            if value is None:
                value = {}
            if not isinstance(value, dict):
                raise self.fail(key, f"should be a mapping, is {shown(value)}")
            self.sections[key] = ConfigSource(value, f"{self.name}[{key}]")
        return self.sections[key]

    def integer(self, key: str, default: int | None = None, limits: Range | None = None) -> int:
        """Return an integer in the range `limits`. None stands for the range that RANGES has for `key`."""
        return self._value(key, "an integer", default, int, limits=limits)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number in the range that RANGES has for `key`."""
        return float(self._value(key, "a number", default, int, float))

    def boolean(self, key: str, default: bool) -> bool:
        """Return true or false. Null, which transformers reads as false, is refused if the default is true."""
        if default and key in self.values and self.values[key] is None:
            raise self.fail(key, "is null; give true or false")
        return self._value(key, "true or false", default, bool)

    def string(self, key: str, default: str | None = None) -> str:
        return self._value(key, "a string", default, str)

    def strings(self, key: str) -> tuple[str, ...]:
        """Return a list of strings. Empty if absent."""
        return tuple(self._list(key, "strings", str) or ())

    def integers(self, key: str) -> tuple[int, ...] | None:
        """Return a list of integers. None if absent."""
        values = self._list(key, "integers", int)
        return None if values is None else tuple(values)

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return a list of at most 4096 finite numbers, each in the range of `key`. The list may be empty."""
        values = self._list(key, "numbers", int, float)
        if values is None or len(values) > 4096:
            raise self.fail(key, f"should be a list of numbers, is {shown(values)}")
        for value in values:
            self._check_range(key, value)
        return tuple(map(float, values))

    def require(self, required: Mapping[str, object]) -> None:
        """Raise CheckpointError unless each of these keys is absent, is null, or has the required value."""
        for key, value in required.items():
            if self.has(key) and (type(self.take(key)), self.take(key)) != (type(value), value):
                raise self.fail(key, f"is {shown(self.values[key])}; only {shown(value)} is supported")

    def _value(self, key: str, what: str, default: Any, *types: type, limits: Range | None = None) -> Any:
        """Return the value of `key`, of exactly one of these types: a bool is no integer. The default if absent."""
        value = self.take(key)
        if value is None:
            if default is None:
                raise self.fail(key, f"is missing; it should be {what}")
            return default
        if type(value) not in types:
            raise self.fail(key, f"should be {what}, is {shown(value)}")
        if int in types:
            self._check_range(key, value, limits)
        return value

    def _list(self, key: str, what: str, *types: type) -> list[Any] | None:
        values = self.take(key)
        if values is not None and (not isinstance(values, list) or any(type(v) not in types for v in values)):
            raise self.fail(key, f"should be a list of {what}, is {shown(values)}")
        return values

    def _check_range(self, key: str, value: float, limits: Range | None = None) -> None:
        limits = limits or RANGES[key]
        if not limits.least <= value <= limits.most:  # false for NaN too
            raise self.fail(key, f"should be at least {limits.least:g} and at most {limits.most:g}, is {shown(value)}")


def holder_of(key: str, *sections: ConfigSource) -> ConfigSource:
    """Return the first of these sections that has `key` with a value other than null.

    If none does, return the first that has it as null, or the last section. Two sections with different values are
    refused: host engines differ on which one counts.
    """
    holders = [section for section in sections if section.has(key)]
    holders = holders or [section for section in sections if key in section.values] or [sections[-1]]
    first = holders[0]
    for other in holders[1:]:
        if other.take(key) != first.values[key]:
            raise first.fail(key, f"is {shown(first.values[key])}, and {shown(other.values[key])} in {other.name}")
    return first


def check_keys(source: ConfigSource, *, strict: bool = False) -> None:
    """Account for every key of a configuration and of its sections that were read. Call it after the reader.

    Unknown keys at the top level are ignored with one warning that names them, since tools leave many there and the
    architectures themselves read none of them. `transformer_layer_config` and `text_config` count as top levels too.
    In every other section unknown keys are refused.

    Args:
        strict: refuse unknown keys of `source` too.

    Raises:
        CheckpointError: a key changes the computation in a way that is not supported, or a section that is strict has
            an unknown key.
    """
    unknown: list[str] = []
    for key, value in source.values.items():
        if key in source.taken or key in HARMLESS or value is None:
            continue
        if key in NEUTRAL:
            if value not in NEUTRAL[key]:
                problem = f"is {shown(value)}; models with it are not supported"
                raise source.fail(key, f"{problem}; take the key out if this model was trained without it")
        elif not key.startswith("_"):
            unknown.append(key)
    if unknown and strict:
        problem = f"is {shown(source.values[unknown[0]])}; this key is not known here"
        raise source.fail(unknown[0], f"{problem}; take it out if nothing that the model was trained with reads it")
    if unknown:
        _LOG.warning("%s: ignored unknown keys %s", source.name, shown(sorted(unknown)))
    for key, section in source.sections.items():
        check_keys(section, strict=key not in ("transformer_layer_config", "text_config"))


def read_config(folder: Path) -> ConfigSource:
    """Return the contents of `folder/config.json`, or the same keys from a GGUF file."""
    if is_gguf(folder):
        return ConfigSource(json_of(folder, "config.json") or {}, str(folder))
    path = checked_folder(folder) / "config.json"
    if not exists(path):
        raise CheckpointError(f"{folder} has no config.json (it holds: {listed(folder)})")
    if exists(folder / "adapter_config.json"):
        raise CheckpointError(f"{folder} holds an adapter (adapter_config.json); merge it into the model first")
    return ConfigSource(read_json(path), str(path))
