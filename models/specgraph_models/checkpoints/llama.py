"""Reads Llama-shaped models: one decoder layer, a whole target, and a whole model that drafts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from specgraph_models.checkpoints.architectures import ARCHITECTURES
from specgraph_models.checkpoints.config_source import ConfigSource
from specgraph_models.checkpoints.delta import load_delta
from specgraph_models.checkpoints.drafter import DrafterFolder
from specgraph_models.checkpoints.experts import load_experts
from specgraph_models.checkpoints.folder import CheckpointFolder
from specgraph_models.checkpoints.formats import DrafterFormat, Reader
from specgraph_models.checkpoints.latent import load_latent
from specgraph_models.checkpoints.model_config import context_length, model_config
from specgraph_models.checkpoints.stored import part_of
from specgraph_models.checkpoints.text_model import lm_head_name, text_prefix, text_source
from specgraph_models.config import ModelConfig
from specgraph_models.draft_model import DraftModelHead
from specgraph_models.errors import CheckpointError
from specgraph_models.layers import DecoderLayer, Weight
from specgraph_models.llama import LlamaTarget
from specgraph_models.parallel import Share

MOST_PADDING = 128
"""Two vocabularies of one tokenizer may differ by this number of rows: they are padded to multiples of up to it."""


class _Part(NamedTuple):
    """One stored matrix of a linear, and its bias."""

    name: str
    rows: int
    share: Share | None
    """This rank's part of the matrix: some rows, or some columns of all rows. None for all of it."""


class _Linear(NamedTuple):
    """A linear of a layer: its parts, joined along their rows."""

    module: str
    parts: list[_Part]
    columns: int
    biased: bool
    packed: str = ""
    """The name of the tensor that holds the rows of all parts, in an architecture with packed projections."""


def _linears(config: ModelConfig, input_size: int) -> dict[str, _Linear]:
    """Return the linears of a layer without latents or experts, by field of `DecoderLayer`."""
    hidden, inner, dim, ranks = config.hidden_size, config.intermediate_size, config.head_dim, config.tensor_parallel
    query, kv, heads = config.num_heads * dim, config.num_kv_heads * dim, config.attention_parallel
    keys = None
    if heads.size > 1:
        keys = Share(0, tuple((h * dim, (h + 1) * dim) for h in range(*heads.kv_heads(config.num_kv_heads))))
    values = query if config.latent is None else config.num_heads * config.latent.value
    rows = ranks.share(0, inner)
    gated = query * (1 + config.output_gate)
    attention = [_Part("q_proj", gated, heads.share(0, gated)), _Part("k_proj", kv, keys), _Part("v_proj", kv, keys)]
    mlp = [_Part("gate_proj", inner, rows), _Part("up_proj", inner, rows)]
    down = [_Part("down_proj", hidden, ranks.share(1, inner))]
    output = [_Part("o_proj", hidden, heads.share(1, values))]
    return {
        "qkv": _Linear("self_attn", attention, input_size, config.qkv_bias, "qkv_proj"),
        "output": _Linear("self_attn", output, values, config.output_bias),
        "gate_up": _Linear("mlp", mlp, hidden, config.mlp_bias, "gate_up_proj"),
        "down": _Linear("mlp", down, inner, config.mlp_bias),
    }


def _norms(config: ModelConfig) -> dict[str, tuple[str, int]]:
    """Return the norms of a layer: field of `DecoderLayer` -> name in the checkpoint, and size."""
    hidden, head = config.hidden_size, config.head_dim
    norms = {"post_norm": ("post_attention_layernorm", hidden), "input_norm": ("input_layernorm", hidden)}
    if config.qk_norm or config.whole_qk_norm:
        of_query, of_key = (config.num_heads, config.num_kv_heads) if config.whole_qk_norm else (1, 1)
        norms["query_norm"] = ("self_attn.q_norm", of_query * head)
        norms["key_norm"] = ("self_attn.k_norm", of_key * head)
    if config.output_norms:  # there are norms before and after attention and MLP; "post_attention" is right after it
        norms |= {
            "post_norm": ("pre_feedforward_layernorm", hidden),
            "attention_norm": ("post_attention_layernorm", hidden),
            "mlp_norm": ("post_feedforward_layernorm", hidden),
        }
    return norms


def load_decoder_layer(
    folder: CheckpointFolder,
    prefix: str,
    config: ModelConfig,
    input_size: int | None = None,
    input_norm: bool = True,
    index: int | None = None,
) -> DecoderLayer:
    """Read one layer. Its tensors are named `prefix.self_attn.q_proj.weight` and so on.

    Args:
        prefix: for example "model.layers.0".
        config: the sizes, and the optional tensors that exist.
        input_size: columns of the query, key and value projections. None for `hidden_size` (EAGLE-3: twice that).
        input_norm: False if there is no `prefix.input_layernorm`.
        index: the layer's number, which decides if it has a mixture of experts, and if it is recurrent. None for a
            layer beyond the model's own (an MTP module), which has a mixture if any layer has, and attention.
    """
    linears, ranks = _linears(config, input_size or config.hidden_size), config.tensor_parallel
    tensors: dict[str, Any] = {}
    recurrent = index is not None and any(config.recurrent[index : index + 1])
    if recurrent and config.delta is not None:
        tensors |= load_delta(folder, prefix, config.delta, config.hidden_size)
    if config.latent is not None:
        packed, tensors["latent"] = load_latent(folder, prefix, config, config.latent)
        tensors["qkv"] = Weight(packed)
    if config.experts is not None and (index is None or config.experts.layers[index]):
        tensors |= load_experts(folder, prefix, config.experts, config.hidden_size, ranks)
    for field, linear in linears.items():
        if field not in tensors:
            tensors[field] = _read(folder, prefix, linear, config.packed_projections)
    for field, (name, size) in _norms(config).items():
        if (input_norm or field != "input_norm") and not (recurrent and name.startswith("self_attn")):
            tensors[field] = norm_weight(folder, f"{prefix}.{name}.weight", size, config)
    if config.sinks:
        share = ranks.share(0, config.num_heads)
        tensors["sinks"] = folder.weight(f"{prefix}.self_attn.sinks", (config.num_heads,), share=share)
    return DecoderLayer(**tensors, activation=config.activation, tensor_parallel=ranks)


def _read(folder: CheckpointFolder, prefix: str, linear: _Linear, packed: bool) -> Weight:
    """Read the parts of one linear, joined along their rows. A bias is split as the rows are."""
    parts = linear.parts
    if packed and linear.packed:
        ranges: list[tuple[int, int]] = []
        first = 0
        for _, rows, share in parts:
            ranges += [] if share is None else [(first + begin, first + end) for begin, end in share.ranges]
            first += rows
        parts = [_Part(linear.packed, first, Share(0, tuple(ranges)) if ranges else None)]
    names, shares = [f"{prefix}.{linear.module}.{part.name}" for part in parts], [part.share for part in parts]
    shapes = [(part.rows, linear.columns) for part in parts]
    weight = folder.matrix([f"{name}.weight" for name in names], shapes, shares)
    if not linear.biased:
        return weight
    rows = [share if share is not None and share.dim == 0 else None for share in shares]
    return weight._replace(bias=folder.stacked([f"{name}.bias" for name in names], [(p.rows,) for p in parts], rows))


def norm_weight(folder: CheckpointFolder, name: str, size: int, config: ModelConfig) -> Tensor:
    """Return the factors [size] of an RMS norm.

    If the model adds `norm_offset` to them, they are float32: the sum has more digits than bfloat16 keeps.
    """
    if not config.norm_offset:
        return folder.weight(name, (size,))
    return folder.weight(name, (size,), torch.promote_types(folder.dtype, torch.float32)) + config.norm_offset


def load_llama(folder: CheckpointFolder, config: ModelConfig, vocab_size: int | None = None) -> LlamaTarget:
    """Read a target. Its tensors are named `model.layers.0...`, `model.embed_tokens`, `model.norm` and `lm_head`, or
    have another of the prefixes that `text_prefix` finds.

    Args:
        vocab_size: rows of embedding and lm_head, if not the stored number. Rows past it are left out; missing rows are
            zeros.
    """
    if config.unscaled_positions is not None and config.max_position_embeddings > config.unscaled_positions:
        raise CheckpointError(
            f"{folder.folder}: a {config.architecture} model scales queries from position {config.unscaled_positions} "
            f"on, which is not computed here, and it would run with max_model_len {config.max_position_embeddings}: "
            f"give max_model_len={config.unscaled_positions} or less"
        )
    stored, wanted, ranks = config.vocab_size, vocab_size or config.vocab_size, config.tensor_parallel
    rows, prefix = ranks.vocabulary(wanted), text_prefix(folder)

    def table(name: str) -> Tensor:
        if wanted == stored:
            return folder.weight(name, (stored, config.hidden_size), share=rows)
        whole = pad(folder.weight(name, (stored, config.hidden_size)), (0, 0, 0, wanted - stored))
        return whole if rows is None else part_of(whole, rows)

    config = replace(config, vocab_size=wanted)
    embed_tokens = lm_head = table(f"{prefix}embed_tokens.weight")
    head = lm_head_name(folder)
    if not config.tie_word_embeddings or head in folder:
        lm_head = table(head)
        if config.tie_word_embeddings and torch.equal(lm_head, embed_tokens):
            lm_head = embed_tokens  # a copy; an lm_head that differs is used, as in transformers
    return LlamaTarget(
        config,
        embed_tokens,
        [load_decoder_layer(folder, f"{prefix}layers.{i}", config, index=i) for i in range(config.num_layers)],
        norm_weight(folder, f"{prefix}norm.weight", config.hidden_size, config),
        lm_head,
    )


def load_draft_model(opened: DrafterFolder) -> DraftModelHead:
    """Read a small model with the target's tokenizer as a drafter. It gets the target's number of positions.

    Vocabularies of one tokenizer are padded to different sizes (Qwen2.5: 151,936 and 152,064 rows). The target's size
    counts. Rows beyond it are left out, and tokens that the draft model lacks are never drafted.
    """
    config, target = model_config(opened.layers), opened.target
    if config.delta is not None:
        raise CheckpointError(
            f"{opened.layers.name}: a {config.architecture} model has recurrent layers, whose states are kept for "
            "targets alone; draft with its MTP module, an EAGLE-3 or DFlash head, n-grams, or a model without them"
        )
    if abs(config.vocab_size - target.vocab_size) > MOST_PADDING:
        raise CheckpointError(
            f"{opened.layers.name}: the draft model has vocabulary {config.vocab_size}, the target has "
            f"{target.vocab_size}; give a model of the target's tokenizer, padded by at most {MOST_PADDING} rows more "
            "or less"
        )
    if (most := context_length(config)) < target.max_model_len:
        raise CheckpointError(
            f"{opened.layers.name}: the draft model has {most} positions, the target has "
            f"{target.max_model_len}; load the target with max_model_len={most} or less"
        )
    config = config.with_max_position(target.max_model_len).split(target.tensor_parallel)
    model = load_llama(opened.checkpoint, config, target.vocab_size)
    return DraftModelHead(model, target.hidden_size, min(config.vocab_size, target.vocab_size))


def _recognised(source: ConfigSource, folder: CheckpointFolder) -> Iterator[DrafterFormat]:
    model_type, prefix = text_source(source).string("model_type", ""), text_prefix(folder)
    parts = ("embed_tokens.weight", "layers.0.input_layernorm.weight", "norm.weight")  # a model saved without lm_head
    exported = "fc.weight" not in folder and all(name in folder for name in parts)
    whole = exported if prefix == "" else f"{prefix}embed_tokens.weight" in folder
    if model_type in ARCHITECTURES and whole:
        yield DrafterFormat("draft_model", "transformers", f"a whole {model_type} model")


DRAFT_MODEL = Reader("draft_model", ("transformers",), _recognised, load_draft_model)
