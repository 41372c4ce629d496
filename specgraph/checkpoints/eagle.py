"""Reading EAGLE-1 folders: the authors' layout (yuhuili/EAGLE-*), and that of `speculators`."""

from __future__ import annotations

import re

from specgraph.checkpoints.config_source import ConfigSource
from specgraph.checkpoints.fit import DraftedTarget, check_same, drafter_config, shared_or_own
from specgraph.checkpoints.folder import CheckpointFolder
from specgraph.checkpoints.formats import DrafterFolder, DrafterFormat, DrafterReader
from specgraph.checkpoints.llama import load_decoder_layer
from specgraph.checkpoints.matrices import load_matrix
from specgraph.models.eagle import EagleHead, EagleWeights


def recognise_eagle(source: ConfigSource, checkpoint: CheckpointFolder) -> DrafterFormat | None:
    """Their config.json looks like any small Llama's; the fusing matrix and the missing final norm tell."""
    if "fc.weight" in checkpoint and "layers.0.mlp.down_proj.weight" in checkpoint and "norm.weight" not in checkpoint:
        return DrafterFormat("eagle", "authors", "tensors fc and layers.0, no final norm")
    return None


def load_eagle(opened: DrafterFolder, target: DraftedTarget) -> EagleHead:
    """Read a head in the authors' layout (`fc`, `layers.0`) or that of speculators (`fusion_fc`, `transformer`).

    Raises:
        CheckpointError: a missing tensor, one of another shape, or a head that does not fit the target.
    """
    folder, head, layers = opened.checkpoint, opened.head, opened.layers
    config = drafter_config(layers, target, "llama")
    head.require({"layernorms": False})
    head.taken.update(("fusion_bias", "bias"))  # the tensor itself tells
    hidden = config.hidden_size
    check_same("hidden size", hidden, target.hidden_size, layers.name)
    check_same("vocabulary", config.vocab_size, target.vocab_size, layers.name)
    fc = "fusion_fc" if "fusion_fc.weight" in folder else "fc"
    if "transformer.mlp.down_proj.weight" in folder:
        names = ["transformer"]
    else:
        names = [f"layers.{i}" for i in range(config.num_layers)]
    fusing = load_matrix(folder, [f"{fc}.weight"], [(hidden, 2 * hidden)])
    weights = EagleWeights(
        embed_tokens=shared_or_own(
            folder, "embed_tokens.weight", target, target.embed_tokens, config.vocab_size, hidden
        ),
        fc=fusing._replace(bias=folder.optional_weight(f"{fc}.bias", (hidden,))),
        lm_head=shared_or_own(folder, "lm_head.weight", target, target.lm_head, config.vocab_size, hidden),
    )
    folder.ignore({rf"{re.escape(names[0])}\.input_layernorm\.weight": "the first layer's input norm is the identity"})
    loaded = [load_decoder_layer(folder, name, config, input_norm=i > 0) for i, name in enumerate(names)]
    return EagleHead(config, weights, loaded)


READER = DrafterReader("eagle", recognise_eagle, load_eagle)
