"""Reads the sizes of a Llama-shaped decoder from the keys of a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from specgraph_models.checkpoints.architectures import ARCHITECTURES, OF_TENSORS, Architecture, with_absent_keys
from specgraph_models.checkpoints.config_source import ConfigSource
from specgraph_models.checkpoints.delta import delta_config
from specgraph_models.checkpoints.experts import experts_config
from specgraph_models.checkpoints.files import shown
from specgraph_models.checkpoints.latent import DEEPSEEK, latent_config
from specgraph_models.checkpoints.rotary_config import (
    latent_scale,
    partial_rotary_factor,
    rotary_by_kind,
    rotary_config,
    scaled_from,
)
from specgraph_models.config import ModelConfig
from specgraph_models.errors import CheckpointError
from specgraph_models.latent import LatentConfig

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def model_config(
    source: ConfigSource,
    default_architecture: str | None = None,
    architectures: Mapping[str, Architecture] = ARCHITECTURES,
) -> ModelConfig:
    """Read the sizes of a Llama-shaped decoder. Absent keys have the values of its class in transformers.

    Args:
        source: the configuration.
        default_architecture: used if `model_type` is absent or not one of `architectures`: drafters' folders have names
            of their own there. None for a whole model, which must name its architecture.
        architectures: the architectures that may be read.
    """
    architecture = source.string("model_type", default_architecture)
    if architecture not in architectures:
        if default_architecture is None or default_architecture not in architectures:
            raise source.fail("model_type", f"is {shown(architecture)}; supported are {', '.join(architectures)}")
        architecture = default_architecture
    row = architectures[architecture]
    source = with_absent_keys(source, architecture)
    gemma = architecture == "gemma3_text"
    key, names = ("hidden_activation", ("gelu_pytorch_tanh",)) if gemma else ("hidden_act", ("silu", "swish"))
    activation = source.string(key, names[0])
    if activation not in names:
        raise source.fail(key, f"is {shown(activation)}; only {shown(names[0])} is supported")
    hidden_size = source.integer("hidden_size")
    num_heads = source.integer("num_attention_heads")
    num_kv_heads = source.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise source.fail("num_key_value_heads", f"is {num_kv_heads}, which does not divide {num_heads} query heads")
    latent = latent_config(source) if architecture in DEEPSEEK else None
    if latent is None:
        head_dim, rotary_dim = _head_sizes(source, row.partly_rotated, hidden_size, num_heads)
    else:
        num_kv_heads, rotary_dim, head_dim = 1, latent.rotated, latent.rotated + latent.rank
    num_layers = source.integer("num_hidden_layers")
    delta, recurrent, whole = None, (), default_architecture is None
    if row.hybrid:
        window, sliding = None, ()
        if whole:
            delta, recurrent = delta_config(source, num_layers)
        _take_hybrid_keys(source)
    else:
        window, sliding = _sliding_layers(source, architecture, row, num_layers, whole)
    most = None
    if architecture == "ministral3":
        most = scaled_from(source)
    elif architecture == "minimax_m2":
        source.require({"qk_norm_type": "per_layer"})
        source.taken.update(key for key in source.values if "mtp_" in key)  # about its MTP modules
        if any(kind != 1 for kind in source.integers("attn_type_list") or ()):
            raise source.fail("attn_type_list", "has other values than 1; only full attention is supported")
    rotary, sliding_rotary = rotary_by_kind(source) if gemma else (rotary_config(source), None)
    if rotary.kind == "longrope" and len(rotary.long_factors) != rotary_dim // 2:
        raise source.fail(
            "long_factor", f"has {len(rotary.long_factors)} entries, and each head has {rotary_dim // 2} rotated pairs"
        )
    experts, fields = experts_config(source, architecture, num_layers), dict(row.model)
    for key, names in row.switches.items():
        fields |= dict.fromkeys(names, source.boolean(key, row.absent_keys.get(key, False)))
    source.taken.update(OF_TENSORS)
    source.taken.update(key for key, value in row.always.items() if source.values.get(key) is value)
    return ModelConfig(
        architecture=architecture,
        vocab_size=source.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=source.integer("intermediate_size", experts.inner if experts is not None else None),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=source.number("rms_norm_eps", 1e-6),
        max_position_embeddings=source.integer("max_position_embeddings", 2048),
        tie_word_embeddings=source.boolean("tie_word_embeddings", gemma),
        dtype=config_dtype(source),
        sliding_window=window,
        sliding=sliding,
        rotary=rotary,
        sliding_rotary=sliding_rotary,
        rotary_dim=rotary_dim,
        attention_scale=_attention_scale(source, architecture, latent),
        embedding_scale=hidden_size**0.5 if gemma else 1.0,
        output_gate=row.hybrid and source.boolean("attn_output_gate", True),
        experts=experts,
        latent=latent,
        unscaled_positions=most,
        delta=delta,
        recurrent=recurrent,
        **fields,
    )


def context_length(config: ModelConfig) -> int:
    """Return the most positions that a model may run with as it is stored: `max_position_embeddings`, or more if a yarn
    section scales to more. Qwen's model cards add that section and leave `max_position_embeddings`."""
    rotary = config.rotary
    scaled = int(rotary.original_max_position_embeddings * rotary.factor) if rotary.kind == "yarn" else 0
    return max(config.max_position_embeddings, scaled)


def _head_sizes(source: ConfigSource, partly: bool, hidden_size: int, num_heads: int) -> tuple[int, int]:
    """Return the elements of a head, and the number that is rotated: all, or with `partly` the share of a key."""
    if not source.has("head_dim") and hidden_size % num_heads:
        raise source.fail("hidden_size", f"is {hidden_size}, not a multiple of the {num_heads} attention heads")
    head_dim = source.integer("head_dim", hidden_size // num_heads)
    rotary_dim = int(head_dim * partial_rotary_factor(source))
    if partly and source.has("rotary_dim") and rotary_dim == head_dim:
        rotary_dim = source.integer("rotary_dim")  # an older key (MiniMax-M2)
    if rotary_dim != head_dim and (not partly or rotary_dim % 2 or not rotary_dim):
        problem = f"is {rotary_dim / head_dim:g}, {rotary_dim} of {head_dim} elements; not supported here"
        raise source.fail("partial_rotary_factor", problem)
    if head_dim % 2 or not head_dim:
        raise source.fail("head_dim", f"is {head_dim}; rotary embedding needs an even number")
    return head_dim, rotary_dim


def _attention_scale(source: ConfigSource, architecture: str, latent: LatentConfig | None) -> float | None:
    if latent is not None:
        return (latent.plain + latent.rotated) ** -0.5 * latent_scale(source)
    return source.number("query_pre_attn_scalar", 256.0) ** -0.5 if architecture == "gemma3_text" else None


def require_full_attention(config: ModelConfig, name: str) -> None:
    """Raise CheckpointError if a sliding window would hide any of the model's positions.

    It is for heads with attention that is not causal, and for MTP modules: no source tells which layers have a window.

    Args:
        name: the file of the configuration.
    """
    if any(config.window(layer) is not None for layer in range(config.num_layers)):
        raise CheckpointError(
            f"{name}: 'sliding_window' is {config.sliding_window}, and this kind of drafter has full attention only; "
            f"load the target with max_model_len={config.sliding_window} or less, where the two are the same"
        )


def _take_hybrid_keys(source: ConfigSource) -> None:
    """Take the keys about a target's own recurrent layers, which its MTP modules do not have, and about pictures."""
    source.taken.update(key for key in source.values if key.startswith(("linear_", "mamba_")))
    source.taken.update(("layer_types", "full_attention_interval"))
    for name in ("rope_parameters", "rope_scaling"):  # in text, all sections of mrope have the same position
        source.section(name).taken.update(("mrope_section", "mrope_interleaved"))


def _sliding_layers(
    source: ConfigSource, architecture: str, row: Architecture, num_layers: int, whole: bool
) -> tuple[int | None, tuple[bool, ...]]:
    """Return the sliding window, and for each layer True if it has the window.

    `layer_types` lists it by layer. Without it every layer has the window (Mistral), or the layers from
    `max_window_layers` on (Qwen2 and Qwen3, with `use_sliding_window` only), or none (Llama: transformers and vLLM do
    not read the key). A whole model is refused if `layer_types` has sliding layers and transformers does not read them.
    """
    window = source.integer("sliding_window") if source.has("sliding_window") else None
    if "qwen" in architecture and not source.boolean("use_sliding_window", False):
        window = None
    source.taken.add("sliding_window_pattern")
    types = source.strings("layer_types")
    known = {"full_attention", "sliding_attention"}
    if architecture == "deepseek_v32":
        known |= {"indexed_attention", "deepseek_sparse_attention"}  # written by transformers 5.24 and 5.17
    others = sorted(set(types) - known)
    if others:
        raise source.fail("layer_types", f"has {shown(others)}; 'full_attention' and 'sliding_attention' are supported")
    if "sliding_attention" in types:
        if whole and not row.by_layer:
            problem = f"has sliding_attention, which transformers leaves unread in a {architecture} model"
            raise source.fail("layer_types", f"{problem}; take it out if no layer has a window")
        if window is None:
            raise source.fail("layer_types", "has sliding_attention, and 'sliding_window' does not say how long")
        if len(types) != num_layers:
            raise source.fail("layer_types", f"has {len(types)} entries for {num_layers} layers")
        return window, tuple(kind == "sliding_attention" for kind in types)
    if window is None or row.sliding == "never" or (types and row.sliding == "some layers"):
        return None, ()
    if types:
        raise source.fail(
            "layer_types", f"has full attention only, and 'sliding_window' is {window}; keep the right one"
        )
    if (every := row.full_every) is not None:
        if architecture == "gemma3_text":
            every = source.integer("sliding_window_pattern", every)
        return window, tuple((layer + 1) % every != 0 for layer in range(num_layers))
    first = source.integer("max_window_layers", 28) if row.sliding == "some layers" else 0
    return window, tuple(layer >= first for layer in range(num_layers))


def config_dtype(source: ConfigSource) -> torch.dtype:
    """Return `dtype`, or `torch_dtype` in older files. float32 if there is neither."""
    key = "dtype" if source.has("dtype") else "torch_dtype"
    name = source.string(key, "float32").removeprefix("torch.")
    if name not in _DTYPES:
        raise source.fail(key, f"is {shown(name)}; supported are {', '.join(_DTYPES)}")
    return _DTYPES[name]
