"""Reading MTP modules, alone in a folder or inside a target's checkpoint, in the names of four families.

deepseek      model.layers.{n + i}.{enorm, hnorm, eh_proj, shared_head.norm} beside the layer's own tensors, n layers
              in the target (DeepSeek-V3, GLM)
mimo          model.mtp_layers.{i}.{token_layernorm, hidden_layernorm, input_proj, final_layernorm}; hidden first
qwen          mtp.{pre_fc_norm_embedding, pre_fc_norm_hidden, fc, norm}, mtp.layers.0 (Qwen3-Next): one module
speculators   mtp_layers.{i}, named as mimo's; embedding first
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from specgraph.checkpoints.config_source import ConfigSource
from specgraph.checkpoints.fit import check_same, drafter_config
from specgraph.checkpoints.folder import CheckpointFolder
from specgraph.checkpoints.formats import DrafterFolder, DrafterFormat, DrafterReader
from specgraph.checkpoints.llama import load_decoder_layer
from specgraph.errors import CheckpointError
from specgraph.models.config import ModelConfig
from specgraph.models.llama import LlamaTarget
from specgraph.models.mtp import MtpHead, MtpModule


@dataclass(frozen=True, slots=True)
class MtpNames:
    """Where one family keeps a module's tensors. `{i}` is the module, `{n}` its number among the target's layers."""

    family: str
    layer: str
    embed_norm: str
    hidden_norm: str
    projection: str
    norm: str
    hidden_first: bool = False
    """The projection's first columns take the hidden state."""


FAMILIES = (
    MtpNames(
        "deepseek",
        layer="model.layers.{n}",
        embed_norm="model.layers.{n}.enorm",
        hidden_norm="model.layers.{n}.hnorm",
        projection="model.layers.{n}.eh_proj",
        norm="model.layers.{n}.shared_head.norm",
    ),
    MtpNames(
        "mimo",
        layer="model.mtp_layers.{i}",
        embed_norm="model.mtp_layers.{i}.token_layernorm",
        hidden_norm="model.mtp_layers.{i}.hidden_layernorm",
        projection="model.mtp_layers.{i}.input_proj",
        norm="model.mtp_layers.{i}.final_layernorm",
        hidden_first=True,
    ),
    MtpNames(
        "qwen",
        layer="mtp.layers.{i}",
        embed_norm="mtp.pre_fc_norm_embedding",
        hidden_norm="mtp.pre_fc_norm_hidden",
        projection="mtp.fc",
        norm="mtp.norm",
    ),
    MtpNames(
        "speculators",
        layer="mtp_layers.{i}",
        embed_norm="mtp_layers.{i}.token_layernorm",
        hidden_norm="mtp_layers.{i}.hidden_layernorm",
        projection="mtp_layers.{i}.input_proj",
        norm="mtp_layers.{i}.final_layernorm",
    ),
)


def mtp_family(folder: CheckpointFolder) -> MtpNames | None:
    """Whose MTP names a checkpoint uses, or None when it has no MTP module."""
    for names in FAMILIES:
        pattern = re.compile(
            re.escape(names.projection).replace(r"\{n\}", r"\d+").replace(r"\{i\}", r"\d+") + r"\.weight"
        )
        if any(pattern.fullmatch(name) for name in folder.names()):
            return names
    return None


def recognise_mtp(source: ConfigSource, checkpoint: CheckpointFolder) -> DrafterFormat | None:
    """By the name of the projection, wherever the family keeps it."""
    names = mtp_family(checkpoint)
    return None if names is None else DrafterFormat("mtp", names.family, f"tensors named as {names.projection}")


def load_mtp(opened: DrafterFolder, target: LlamaTarget) -> MtpHead:
    """Read a checkpoint's MTP modules, or the first `num_modules`; embedding and head are the target's.

    Raises:
        CheckpointError: a missing tensor, one of another shape, fewer modules than asked, or another target's.
    """
    folder, layers, num_modules = opened.checkpoint, opened.layers, opened.num_modules
    names = mtp_family(folder)
    if names is None:
        raise CheckpointError(f"{folder.folder} has no MTP projection in the names of {', '.join(_families())}")
    config = drafter_config(layers, target, target.config.architecture)
    check_same("hidden size", config.hidden_size, target.hidden_size, layers.name)
    check_same("vocabulary", config.vocab_size, target.vocab_size, layers.name)
    present = 0
    while f"{_name(names.layer, present, target)}.mlp.down_proj.weight" in folder:
        present += 1
    if names.family == "qwen":
        present = min(present, 1)  # its norms and projection exist once
    if present == 0 or (num_modules or 0) > present:
        raise CheckpointError(
            f"{folder.folder} has {present} MTP module(s) after the target's {target.num_layers} layers, "
            f"asked for {num_modules or 'at least 1'}; ask for fewer, or give the checkpoint that holds them"
        )
    modules = [_load_module(folder, names, i, config, target) for i in range(num_modules or present)]
    return MtpHead(config, modules, target.embed_tokens, target.lm_head)


def _name(pattern: str, module: int, target: LlamaTarget) -> str:
    return pattern.format(i=module, n=target.num_layers + module)


def _load_module(
    folder: CheckpointFolder, names: MtpNames, index: int, config: ModelConfig, target: LlamaTarget
) -> MtpModule:
    hidden = config.hidden_size

    def norm(pattern: str) -> Tensor:
        return folder.weight(f"{_name(pattern, index, target)}.weight", (hidden,))

    projection = folder.weight(f"{_name(names.projection, index, target)}.weight", (hidden, 2 * hidden))
    if names.hidden_first:
        projection = torch.cat(projection.chunk(2, dim=1)[::-1], dim=1)
    return MtpModule(
        embed_norm=norm(names.embed_norm),
        hidden_norm=norm(names.hidden_norm),
        projection=projection,
        layer=load_decoder_layer(folder, _name(names.layer, index, target), config),
        norm=norm(names.norm),
    )


def _families() -> list[str]:
    return [names.family for names in FAMILIES]


READER = DrafterReader("mtp", recognise_mtp, load_mtp)
