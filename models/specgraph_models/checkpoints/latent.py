"""Reads multi-head latent attention (DeepSeek-V3): its sizes from config.json, and the tensors of one layer."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from specgraph_models.checkpoints.config_source import ConfigSource
from specgraph_models.checkpoints.folder import CheckpointFolder
from specgraph_models.config import ModelConfig
from specgraph_models.errors import CheckpointError
from specgraph_models.latent import LatentAttention, LatentConfig
from specgraph_models.layers import Weight

DEEPSEEK = ("deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe_lite")
"""The architectures with latent attention."""


def latent_config(source: ConfigSource) -> LatentConfig:
    """Return the sizes of heads and latents."""
    source.require({"attention_bias": False})
    source.taken.update(("head_dim", "qk_head_dim"))  # sums or copies of the sizes below
    if source.has("index_topk"):  # the indexer is not read, and the kinds of layers are the target's
        source.taken.update(("index_head_dim", "index_n_heads", "mlp_layer_types"))
    rotated = source.integer("qk_rope_head_dim")
    if rotated % 2:
        raise source.fail("qk_rope_head_dim", f"is {rotated}; rotary embedding needs an even number")
    return LatentConfig(
        query_rank=source.integer("q_lora_rank") if source.has("q_lora_rank") else None,
        rank=source.integer("kv_lora_rank"),
        rotated=rotated,
        plain=source.integer("qk_nope_head_dim"),
        value=source.integer("v_head_dim"),
        in_pairs=source.boolean("rope_interleave", True),
        index_topk=source.integer("index_topk") if source.has("index_topk") else None,
    )


def load_latent(
    folder: CheckpointFolder, prefix: str, model: ModelConfig, config: LatentConfig
) -> tuple[Tensor, LatentAttention]:
    """Read the packed projection of the layer `prefix`, and the rest of its attention.

    Rotated parts that are stored as pairs (2i, 2i + 1) are reordered to pairs (i, i + rotated / 2), the order that all
    rotations here take. Queries and keys are reordered alike, so scores stay the same.

    Raises:
        CheckpointError: the indexer would hide some keys of the longest text (DeepSeek-V3.2). Up to `index_topk` keys
            it chooses them all, so its weights change nothing.
    """
    if config.index_topk is not None:
        if model.max_position_embeddings > config.index_topk:
            raise CheckpointError(
                f"{folder.folder}: 'index_topk' is {config.index_topk}, and this model would run with "
                f"max_model_len {model.max_position_embeddings}; attention to chosen keys is not computed here: give "
                f"the target max_model_len={config.index_topk} or less, where all keys are chosen"
            )
        folder.ignore({rf"{re.escape(prefix)}\.self_attn\.indexer\..*": "it chooses every key"})
    heads, hidden, head = model.num_heads, model.hidden_size, config.plain + config.rotated
    name = f"{prefix}.self_attn"
    query_norm = query_up = None
    if config.query_rank is None:
        first = _reordered(folder.weight(f"{name}.q_proj.weight", (heads * head, hidden)), heads, config)
    else:
        first = folder.weight(f"{name}.q_a_proj.weight", (config.query_rank, hidden))
        query_norm = folder.weight(f"{name}.q_a_layernorm.weight", (config.query_rank,))
        up = folder.weight(f"{name}.q_b_proj.weight", (heads * head, config.query_rank))
        query_up = Weight(_reordered(up, heads, config))
    down = folder.weight(f"{name}.kv_a_proj_with_mqa.weight", (config.rank + config.rotated, hidden))
    up = folder.weight(f"{name}.kv_b_proj.weight", (heads * (config.plain + config.value), config.rank))
    key_up, value_up = up.view(heads, -1, config.rank).split((config.plain, config.value), dim=1)
    weights = LatentAttention(
        config=config,
        norm=folder.weight(f"{name}.kv_a_layernorm.weight", (config.rank,)),
        key_up=key_up.contiguous(),
        value_up=value_up.transpose(1, 2).contiguous(),
        query_norm=query_norm,
        query_up=query_up,
    )
    return torch.cat((first, _reordered(down, 1, config))), weights


def _reordered(weight: Tensor, heads: int, config: LatentConfig) -> Tensor:
    """Reorder the rotated rows at the end of each head: even rows first."""
    if not config.in_pairs:
        return weight
    rows = weight.view(heads, -1, weight.shape[1])
    plain, rotated = rows.split((rows.shape[1] - config.rotated, config.rotated), dim=1)
    return torch.cat((plain, rotated[:, ::2], rotated[:, 1::2]), dim=1).flatten(0, 1)
