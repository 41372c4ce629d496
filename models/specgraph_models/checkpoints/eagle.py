"""Reads EAGLE-1 folders, in the authors' layout (yuhuili/EAGLE-*) and in that of `speculators`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from specgraph_models.checkpoints.config_source import ConfigSource
from specgraph_models.checkpoints.drafter import DrafterFolder
from specgraph_models.checkpoints.folder import CheckpointFolder
from specgraph_models.checkpoints.formats import DrafterFormat, Reader
from specgraph_models.checkpoints.llama import load_decoder_layer
from specgraph_models.eagle import EagleHead


def load_eagle(opened: DrafterFolder) -> EagleHead:
    """Read a head in the authors' names (`fc`, `layers.0`) or in speculators' (`fusion_fc`, `transformer`)."""
    folder, head = opened.checkpoint, opened.head
    config, names = opened.eagle_layers("transformer" if "transformer.mlp.down_proj.weight" in folder else "layers.0")
    head.require({"layernorms": False})
    hidden = config.hidden_size
    opened.check_same("hidden size", hidden, opened.target.hidden_size)
    fc = "fusion_fc" if "fusion_fc.weight" in folder else "fc"
    fusing = folder.matrix([f"{fc}.weight"], [(hidden, 2 * hidden)])
    fusing = fusing._replace(bias=folder.optional_weight(f"{fc}.bias", (hidden,)))
    for key in ("fusion_bias", "bias"):  # speculators' name, the authors' name; without either the tensor decides
        if head.has(key) and head.boolean(key, False) != (fusing.bias is not None):
            there = "no" if fusing.bias is None else "a"
            raise head.fail(key, f"is {head.values[key]}, and the folder has {there} tensor '{fc}.bias'")
    folder.ignore({rf"{re.escape(names[0])}\.input_layernorm\.weight": "the first layer's input norm is the identity"})
    return EagleHead(
        config,
        opened.embedding("embed_tokens.weight", hidden),
        fusing,
        [load_decoder_layer(folder, name, config, input_norm=i > 0) for i, name in enumerate(names)],
        opened.lm_head("lm_head.weight", config.vocab_size, hidden),
    )


def _recognised(source: ConfigSource, folder: CheckpointFolder) -> Iterator[DrafterFormat]:
    if "fc.weight" in folder and "layers.0.mlp.down_proj.weight" in folder and "norm.weight" not in folder:
        yield DrafterFormat("eagle", "authors", "tensors fc and layers.0, no final norm")


EAGLE = Reader("eagle", ("speculators", "authors"), _recognised, load_eagle)
