"""Reading Llama-shaped models: one decoder layer, a whole target, and a whole model that drafts."""

from __future__ import annotations

import torch
from torch import Tensor

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
    hidden, inner, width = config.hidden_size, config.intermediate_size, input_size or config.hidden_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    ranks, heads = config.tensor_parallel, _head_shares(config)
    qkv = [f"{prefix}.self_attn.{name}_proj" for name in ("q", "k", "v")]
    gate_up = [f"{prefix}.mlp.{name}_proj" for name in ("gate", "up")]

    def weight(name: str, *shape: int, share: Share | None = None) -> Tensor:
        return folder.weight(f"{prefix}.{name}", shape, share=share)

    def norm(name: str, size: int = hidden) -> Tensor:
        loaded = weight(f"{name}.weight", size)
        return loaded + config.norm_offset if config.norm_offset else loaded

    def packed(name: str, names: list[str], sizes: list[int], columns: int, shares: list[Share | None]) -> Weight:
        if config.packed_projections:
            return matrix(name, sum(sizes), columns, share=_packed_share(sizes, shares))
        return load_matrix(folder, [f"{n}.weight" for n in names], [(size, columns) for size in sizes], shares)

    def matrix(name: str, rows: int, columns: int, share: Share | None) -> Weight:
        return load_matrix(folder, [f"{prefix}.{name}.weight"], [(rows, columns)], [share])

    # Gemma 3 normalises before and after; there "post_attention" is what follows attention at once.
    before_mlp = "pre_feedforward_layernorm" if config.output_norms else "post_attention_layernorm"

    latent = None
    if config.latent is not None:
        packed_latent, latent = load_latent(folder, prefix, config, config.latent)
        projection = Weight(packed_latent)
        query = config.num_heads * config.latent.value
    else:
        projection = packed("self_attn.qkv_proj", qkv, [query, kv, kv], width, heads)
    experts = None
    if config.experts is not None and (index is None or config.experts.layers[index]):
        experts = load_experts(folder, prefix, config.experts, hidden, ranks)
    if config.qkv_bias:
        bias = folder.stacked([f"{n}.bias" for n in qkv], [(query,), (kv,), (kv,)], heads)
        projection = projection._replace(bias=bias)
    output = matrix("self_attn.o_proj", hidden, query, share=ranks.share(1, query))
    if config.output_bias:
        output = output._replace(bias=weight("self_attn.o_proj.bias", hidden))
    if experts is None:
        first = packed("mlp.gate_up_proj", gate_up, [inner, inner], hidden, [ranks.share(0, inner)] * 2)
        second = matrix("mlp.down_proj", hidden, inner, share=ranks.share(1, inner))
        if config.mlp_bias:
            bias = folder.stacked([f"{n}.bias" for n in gate_up], [(inner,)] * 2, [ranks.share(0, inner)] * 2)
            first = first._replace(bias=bias)
            second = second._replace(bias=weight("mlp.down_proj.bias", hidden))
    else:
        first, second = experts.gate_up, experts.down
    layer = DecoderLayer(
        qkv=projection,
        output=output,
        post_norm=norm(before_mlp),
        gate_up=first,
        down=second,
        input_norm=norm("input_layernorm") if input_norm else None,
        query_norm=norm("self_attn.q_norm", config.head_dim) if config.qk_norm else None,
        key_norm=norm("self_attn.k_norm", config.head_dim) if config.qk_norm else None,
        experts=None if experts is None else experts.experts,
        sinks=weight("self_attn.sinks", config.num_heads, share=ranks.share(0, config.num_heads))
        if config.sinks
        else None,
        attention_norm=norm("post_attention_layernorm") if config.output_norms else None,
        mlp_norm=norm("post_feedforward_layernorm") if config.output_norms else None,
        activation=config.activation,
        latent=latent,
        tensor_parallel=ranks,
    )
    return scale_kv(folder, f"{prefix}.self_attn", layer, config) if folder.kv_scales and latent is None else layer


def _head_shares(config: ModelConfig) -> list[Share | None]:
    """Rows of the query, key and value projections that this rank has."""
    ranks, dim = config.tensor_parallel, config.head_dim
    if ranks.size == 1:
        return [None] * 3
    kv = Share(0, tuple((h * dim, (h + 1) * dim) for h in range(*ranks.kv_heads(config.num_kv_heads))))
    return [ranks.share(0, config.num_heads * dim), kv, kv]


def _packed_share(sizes: list[int], shares: list[Share | None]) -> Share | None:
    """The shares of matrices of `sizes` rows, where one tensor holds them one after the other."""
    ranges: list[tuple[int, int]] = []
    first = 0
    for size, share in zip(sizes, shares, strict=True):
        if share is None:
            return None
        ranges += [(first + begin, first + end) for begin, end in share.ranges]
        first += size
    return Share(0, tuple(ranges))


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
