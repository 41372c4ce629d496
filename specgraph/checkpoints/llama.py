"""Reading Llama-shaped models: one decoder layer, a whole target, and a whole model that drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from specgraph.checkpoints.config_source import ConfigSource
from specgraph.checkpoints.experts import load_experts
from specgraph.checkpoints.fit import DraftedTarget, check_same
from specgraph.checkpoints.folder import CheckpointFolder
from specgraph.checkpoints.formats import DrafterFolder, DrafterFormat, DrafterReader
from specgraph.checkpoints.kv_scales import scale_kv
from specgraph.checkpoints.latent import load_latent
from specgraph.checkpoints.matrices import load_matrix
from specgraph.checkpoints.model_config import ARCHITECTURES, model_config
from specgraph.errors import CheckpointError
from specgraph.models.config import ModelConfig
from specgraph.models.draft_model import DraftModelHead
from specgraph.models.layers import DecoderLayer, Weight
from specgraph.models.llama import LlamaTarget
from specgraph.parallel import Share


def load_decoder_layer(
    folder: CheckpointFolder,
    prefix: str,
    config: ModelConfig,
    input_size: int | None = None,
    input_norm: bool = True,
    index: int | None = None,
) -> DecoderLayer:
    """Read one layer whose tensors are named `prefix.self_attn.q_proj.weight` and so on.

    Args:
        folder: the checkpoint.
        prefix: for example "model.layers.0".
        config: sizes, and which optional tensors exist.
        input_size: columns of the query, key and value projections; `hidden_size` when None (EAGLE-3: twice that).
        input_norm: whether `prefix.input_layernorm` exists.
        index: the layer's number, which says whether it has a mixture of experts; None for a layer beyond the model's
            (an MTP module), which has one if any has.

    Raises:
        CheckpointError: a missing tensor or one of another shape.
    """
    hidden, inner, ranks = config.hidden_size, config.intermediate_size, config.tensor_parallel
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    latent = experts = sinks = None
    if config.latent is not None:
        packed, latent = load_latent(folder, prefix, config, config.latent)
        qkv = Weight(packed)
        query = config.num_heads * config.latent.value
    else:
        queries, keys = _head_shares(config)
        parts = [_Part("q_proj", query, queries), _Part("k_proj", kv, keys), _Part("v_proj", kv, keys)]
        stored = _stored(config, "qkv_proj", parts)
        qkv = _linear(folder, f"{prefix}.self_attn", stored, input_size or hidden, config.qkv_bias)
    if config.experts is not None and (index is None or config.experts.layers[index]):
        experts = load_experts(folder, prefix, config.experts, hidden, ranks)
    output_part = _Part("o_proj", hidden, ranks.share(1, query))
    output = _linear(folder, f"{prefix}.self_attn", [output_part], query, config.output_bias)
    if experts is None:
        parts = [_Part(name, inner, ranks.share(0, inner)) for name in ("gate_proj", "up_proj")]
        stored = _stored(config, "gate_up_proj", parts)
        gate_up = _linear(folder, f"{prefix}.mlp", stored, hidden, config.mlp_bias)
        down_part = _Part("down_proj", hidden, ranks.share(1, inner))
        down = _linear(folder, f"{prefix}.mlp", [down_part], inner, config.mlp_bias)
    else:
        gate_up, down = experts.gate_up, experts.down
    norms = {
        field: folder.weight(f"{prefix}.{name}.weight", (size,))
        for field, (name, size) in _norms(config).items()
        if input_norm or field != "input_norm"
    }
    if config.norm_offset:
        norms = {field: norm + config.norm_offset for field, norm in norms.items()}
    if config.sinks:
        share = ranks.share(0, config.num_heads)
        sinks = folder.weight(f"{prefix}.self_attn.sinks", (config.num_heads,), share=share)
    layer = DecoderLayer(
        qkv=qkv,
        output=output,
        post_norm=norms["post_norm"],
        gate_up=gate_up,
        down=down,
        input_norm=norms.get("input_norm"),
        query_norm=norms.get("query_norm"),
        key_norm=norms.get("key_norm"),
        experts=None if experts is None else experts.experts,
        sinks=sinks,
        attention_norm=norms.get("attention_norm"),
        mlp_norm=norms.get("mlp_norm"),
        activation=config.activation,
        latent=latent,
        tensor_parallel=ranks,
    )
    return scale_kv(folder, f"{prefix}.self_attn", layer, config) if folder.kv_scales and latent is None else layer


def _norms(config: ModelConfig) -> dict[str, tuple[str, int]]:
    """The norms of a layer: field of `DecoderLayer` -> name in the checkpoint, and size."""
    hidden, head = config.hidden_size, config.head_dim
    norms = {"post_norm": ("post_attention_layernorm", hidden), "input_norm": ("input_layernorm", hidden)}
    if config.qk_norm:
        norms |= {"query_norm": ("self_attn.q_norm", head), "key_norm": ("self_attn.k_norm", head)}
    if config.output_norms:  # before and after attention and MLP; "post_attention" is what follows attention at once
        norms |= {
            "post_norm": ("pre_feedforward_layernorm", hidden),
            "attention_norm": ("post_attention_layernorm", hidden),
            "mlp_norm": ("post_feedforward_layernorm", hidden),
        }
    return norms


class _Part(NamedTuple):
    """A matrix of a linear, and its bias, as the checkpoint stores them."""

    name: str
    rows: int
    share: Share | None
    """This rank's part of the matrix: some rows, or some columns of all rows; None for all."""


def _stored(config: ModelConfig, packed: str, parts: list[_Part]) -> list[_Part]:
    """The parts; or one of the name `packed` where the checkpoint holds their rows in one tensor."""
    if not config.packed_projections:
        return parts
    ranges: list[tuple[int, int]] = []
    first = 0
    for _, rows, share in parts:
        ranges += [] if share is None else [(first + begin, first + end) for begin, end in share.ranges]
        first += rows
    return [_Part(packed, first, Share(0, tuple(ranges)) if ranges else None)]


def _linear(folder: CheckpointFolder, module: str, parts: Sequence[_Part], columns: int, biased: bool) -> Weight:
    """Read the parts of one linear, joined along their rows. A bias is split as the rows are."""
    names, shares = [f"{module}.{part.name}" for part in parts], [part.share for part in parts]
    weight = load_matrix(folder, [f"{name}.weight" for name in names], [(part.rows, columns) for part in parts], shares)
    if not biased:
        return weight
    rows = [share if share is not None and share.dim == 0 else None for share in shares]
    return weight._replace(bias=folder.stacked([f"{name}.bias" for name in names], [(p.rows,) for p in parts], rows))


def _head_shares(config: ModelConfig) -> tuple[Share | None, Share | None]:
    """Rows of the query projection that this rank has, and those of the key and value projections."""
    ranks, dim = config.tensor_parallel, config.head_dim
    if ranks.size == 1:
        return None, None
    kv = Share(0, tuple((h * dim, (h + 1) * dim) for h in range(*ranks.kv_heads(config.num_kv_heads))))
    return ranks.share(0, config.num_heads * dim), kv


def load_llama(folder: CheckpointFolder, config: ModelConfig) -> LlamaTarget:
    """Read a target whose tensors are named `model.layers.0...`, `model.embed_tokens`, `model.norm`, `lm_head`.

    Raises:
        CheckpointError: a missing tensor or one of another shape.
    """
    vocabulary = (config.vocab_size, config.hidden_size)
    rows = config.tensor_parallel.vocabulary(config.vocab_size)
    embed_tokens = folder.weight("model.embed_tokens.weight", vocabulary, share=rows)
    lm_head = embed_tokens
    if not config.tie_word_embeddings or "lm_head.weight" in folder:
        lm_head = folder.weight("lm_head.weight", vocabulary, share=rows)
        if config.tie_word_embeddings and torch.equal(lm_head, embed_tokens):
            lm_head = embed_tokens  # a copy; one that differs is used, as transformers does
    return LlamaTarget(
        config,
        embed_tokens,
        [load_decoder_layer(folder, f"model.layers.{i}", config, index=i) for i in range(config.num_layers)],
        folder.weight("model.norm.weight", (config.hidden_size,)) + config.norm_offset,
        lm_head,
    )


def recognise_draft_model(source: ConfigSource, checkpoint: CheckpointFolder) -> DrafterFormat | None:
    """A whole model of an architecture that is read here."""
    model_type = source.string("model_type", "")
    if model_type in ARCHITECTURES and "model.embed_tokens.weight" in checkpoint:
        return DrafterFormat("draft_model", "transformers", f"a whole {model_type} model")
    return None


def load_draft_model(opened: DrafterFolder, target: DraftedTarget) -> DraftModelHead:
    """Read a small model as a drafter, with as many positions as the target has.

    Raises:
        CheckpointError: another vocabulary than the target's, fewer positions, or a missing or misshapen tensor.
    """
    config, source = model_config(opened.layers), opened.layers.name
    check_same("vocabulary", config.vocab_size, target.vocab_size, source)
    if config.max_position_embeddings < target.max_model_len:
        raise CheckpointError(
            f"{source}: the draft model has {config.max_position_embeddings} positions, the target runs with "
            f"{target.max_model_len}; load the target with max_model_len={config.max_position_embeddings} or less"
        )
    config = config.with_max_position(target.max_model_len).split(target.tensor_parallel)
    model = load_llama(opened.checkpoint, config)
    return DraftModelHead(model, target.hidden_size)


READER = DrafterReader("draft_model", recognise_draft_model, load_draft_model, speculators=False)
