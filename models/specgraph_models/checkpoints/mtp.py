"""Reads MTP modules, alone in a folder or inside a target's checkpoint, under the names of four families.

deepseek      model.layers.{n + i}.{enorm, hnorm, eh_proj, shared_head.norm} beside the layer's own tensors, n layers
              in the target (DeepSeek-V3, GLM)
mimo          model.mtp_layers.{i}.{token_layernorm, hidden_layernorm, input_proj, final_layernorm}; hidden first
qwen          mtp.{pre_fc_norm_embedding, pre_fc_norm_hidden, fc, norm}, mtp.layers.0 (Qwen3-Next, Qwen3.5): one
              module
speculators   mtp_layers.{i}, named as mimo's; embedding first
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from specgraph_models.checkpoints.architectures import MTP_ARCHITECTURES
from specgraph_models.checkpoints.config_source import ConfigSource
from specgraph_models.checkpoints.drafter import DraftedTarget, DrafterFolder
from specgraph_models.checkpoints.folder import CheckpointFolder
from specgraph_models.checkpoints.formats import DrafterFormat, Reader
from specgraph_models.checkpoints.llama import load_decoder_layer, norm_weight
from specgraph_models.checkpoints.model_config import require_full_attention
from specgraph_models.checkpoints.text_model import OTHER_TENSORS
from specgraph_models.config import ModelConfig
from specgraph_models.errors import CheckpointError
from specgraph_models.layers import Weight
from specgraph_models.mtp import MtpHead, MtpModule


@dataclass(frozen=True, slots=True)
class MtpNames:
    """The names of a module's tensors in one family. `{i}` counts modules, `{n}` counts on from the target's layers."""

    family: str
    layer: str
    """Prefix of the decoder layer's tensors."""
    parts: str
    """Prefix of the module's four other tensors."""
    embed_norm: str
    hidden_norm: str
    projection: str
    norm: str
    hidden_first: bool = False
    """The projection's first columns multiply the hidden state, not the embedding."""

    @property
    def projections(self) -> re.Pattern[str]:
        """The pattern of the names of all modules' projections."""
        name = re.escape(f"{self.parts}.{self.projection}.weight")
        return re.compile(name.replace(r"\{n\}", r"\d+").replace(r"\{i\}", r"\d+"))


_DEEPSEEK = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
_MIMO = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
_QWEN = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")

FAMILIES = (
    MtpNames("deepseek", "model.layers.{n}", "model.layers.{n}", *_DEEPSEEK),
    MtpNames("mimo", "model.mtp_layers.{i}", "model.mtp_layers.{i}", *_MIMO, hidden_first=True),
    MtpNames("qwen", "mtp.layers.{i}", "mtp", *_QWEN),
    MtpNames("speculators", "mtp_layers.{i}", "mtp_layers.{i}", *_MIMO),
)

OFFSET_NORMS = ("step3p5", "step3p7")
"""Values of `model_type` with norms that multiply by 1 + weight, and with gates in attention (SGLang's step3p5_mtp.py).
Read as DeepSeek's, such modules would draft other tokens."""

COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""Keys of config.json with the number of modules."""

MOST_MODULES = 64
"""The most modules that are searched for. The largest published number is 3."""


def mtp_family(folder: CheckpointFolder) -> MtpNames | None:
    """Return the family with the names that a checkpoint uses for MTP modules. None if it has no module."""
    return next((names for names in FAMILIES if any(map(names.projections.fullmatch, folder.names()))), None)


def mtp_tensors(folder: CheckpointFolder, num_layers: int) -> Mapping[str, str]:
    """Return patterns, for `ignore`, of the tensors of MTP modules beside a target of `num_layers` layers."""
    modules = [r"mtp\..*", r"(model\.)?mtp_layers\..*"]
    for name in folder.names():
        found = re.fullmatch(r"model\.layers\.(\d+)\.eh_proj\.weight", name)
        if found and int(found[1]) >= num_layers:
            modules.append(rf"model\.layers\.{found[1]}\..*")
    return dict.fromkeys(modules, "an MTP module, which only a drafter reads")


def load_mtp(opened: DrafterFolder) -> MtpHead:
    """Read a checkpoint's MTP modules, or the first `num_modules`. Embedding and lm_head are the target's."""
    folder, target, layers, num_modules = opened.checkpoint, opened.target, opened.layers, opened.num_modules
    names = mtp_family(folder)
    if names is None:
        families = ", ".join(names.family for names in FAMILIES)
        raise CheckpointError(f"{folder.folder} has no MTP projection in the names of {families}")
    if (kind := layers.string("model_type", "")) in OFFSET_NORMS:
        raise layers.fail(
            "model_type", f"is {kind}: its MTP modules have norms that multiply by 1 + weight and gates in attention, "
            "which specgraph does not compute; use another drafter, or a head of your own (ModulesHead, DraftHead)"
        )  # fmt: skip
    config = opened.decoder_config(target.architecture, MTP_ARCHITECTURES)
    require_full_attention(config, layers.name)
    opened.check_same("hidden size", config.hidden_size, target.hidden_size)
    present = 0
    while f"{_prefix(names.parts, present, target)}.{names.projection}.weight" in folder and present < MOST_MODULES:
        present += 1
    if names.family == "qwen":
        present = min(present, 1)  # this family has one projection, so one module
    if present == 0 or (num_modules or 0) > present:
        raise CheckpointError(
            f"{folder.folder} has {present} MTP module(s) after the target's {target.num_layers} layers, "
            f"asked for {num_modules or 'at least 1'}; ask for fewer, or give the checkpoint that holds them"
        )
    for source, key in itertools.product((opened.head, layers), COUNTS):
        if num_modules is None and source.has(key) and source.integer(key) > present:
            problem = f"is {source.values[key]}, and the folder has {present} MTP module(s)"
            raise source.fail(key, f"{problem}; fetch the others, or ask for num_modules={present}")
    wanted = num_modules or present
    modules = [_load_module(folder, names, i, config, target) for i in range(wanted)]
    for i in range(wanted, present):
        folder.ignore({re.escape(_prefix(names.layer, i, target)) + r"\..*": "a module that the caller does not want"})
    own = rf"(embed_tokens|norm)\.weight|layers\.({'|'.join(str(i) for i in range(target.num_layers))})\..*"
    folder.ignore({rf"lm_head\.weight|model\.(language_model\.)?({own})|{OTHER_TENSORS}": "the target's own"})
    embed_tokens, lm_head = target.embed_tokens, target.lm_head
    return MtpHead(
        config, modules, opened.shared("embed_tokens.weight", embed_tokens), opened.shared("lm_head.weight", lm_head)
    )


def _prefix(pattern: str, module: int, target: DraftedTarget) -> str:
    return pattern.format(i=module, n=target.num_layers + module)


def _load_module(
    folder: CheckpointFolder, names: MtpNames, index: int, config: ModelConfig, target: DraftedTarget
) -> MtpModule:
    hidden = config.hidden_size
    layer, parts = (_prefix(pattern, index, target) for pattern in (names.layer, names.parts))
    if names.family == "deepseek":  # a module may hold copies of the tensors that it shares with the target
        vocabulary, share = (target.vocab_size, hidden), target.tensor_parallel.vocabulary(target.vocab_size)
        for name, shared in (("embed_tokens", target.embed_tokens), ("shared_head.head", target.lm_head)):
            copy = f"{layer}.{name}.weight"
            if copy in folder and not torch.equal(folder.weight(copy, vocabulary, share=share), shared):
                raise CheckpointError(f"{folder.folder}: {copy!r} differs from the target's own")

    def norm(name: str) -> Tensor:
        return norm_weight(folder, f"{parts}.{name}.weight", hidden, config)

    name = f"{parts}.{names.projection}.weight"
    if names.hidden_first:
        halves = folder.weight(name, (hidden, 2 * hidden)).chunk(2, dim=1)
        projection = Weight(torch.cat(halves[::-1], dim=1))
    else:
        projection = folder.matrix([name], [(hidden, 2 * hidden)])
    return MtpModule(
        embed_norm=norm(names.embed_norm),
        hidden_norm=norm(names.hidden_norm),
        projection=projection,
        layer=load_decoder_layer(folder, layer, config, index=index if names.family == "qwen" else None),
        norm=norm(names.norm),
    )


def _recognised(source: ConfigSource, folder: CheckpointFolder) -> Iterator[DrafterFormat]:
    if (names := mtp_family(folder)) is not None:
        yield DrafterFormat("mtp", names.family, f"tensors named as {names.parts}.{names.projection}")


MTP = Reader("mtp", ("speculators", "DeepSeek and GLM", "MiMo", "Qwen3-Next and Qwen3.5"), _recognised, load_mtp)
