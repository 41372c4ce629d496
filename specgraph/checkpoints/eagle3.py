"""Reading EAGLE-3 and P-EAGLE folders: the layouts of their authors (yuhuili/EAGLE3-*, amazon/*-P-EAGLE), and that of
`speculators`."""

from __future__ import annotations

from torch import Tensor

from specgraph.checkpoints.config_source import ConfigSource
from specgraph.checkpoints.fit import (
    DraftedTarget,
    check_aux_layers,
    check_same,
    draft_to_target,
    drafter_config,
    shared_or_own,
)
from specgraph.checkpoints.folder import CheckpointFolder
from specgraph.checkpoints.formats import DrafterFolder, DrafterFormat, DrafterReader
from specgraph.checkpoints.llama import load_decoder_layer
from specgraph.checkpoints.matrices import load_matrix
from specgraph.models.eagle3 import Eagle3Config, Eagle3Head, Eagle3Weights, PEagleHead
from specgraph.models.layers import DecoderLayer

IGNORED = {
    r"(.*\.)?t2d": "the inverse of d2t",
    r"verifier_(lm_head|norm)\.weight": "the target's, used in training",
}
"""Pattern of tensor names -> why a head of this format does not need it."""

EAGLE_CONFIG = {
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "has_lm_head": True,
}
"""Keys of `eagle_config` that change the computation, with the only value that this head has."""


def default_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """The aux layers of an EAGLE-3 head that lists none: the inputs of an early, the middle and a late layer."""
    return (2, num_layers // 2, num_layers - 3)


def aux_layers_listed(listed: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """The aux layers of a head in the authors' layout that lists `eagle_aux_hidden_state_layer_ids`.

    Two ways of counting are in use, and no key says which. SpecForge lists layers whose *output* was taken, by default
    1, n / 2 - 1 and n - 4 (its pull request 239); others, vLLM among them, list layers whose *input* was taken. The
    output of layer i is the input of layer i + 1, so SpecForge's default names the states of `default_aux_layers`, one
    less each. It is recognised as a whole. SGLang goes by the first id (its pull request 25454; in 32334 a list that
    begins with 24 means inputs).
    """
    outputs = (1, num_layers // 2 - 1, num_layers - 4)
    return default_aux_layers(num_layers) if listed == outputs else listed


def eagle3_config(
    source: ConfigSource, layers: ConfigSource, target: DraftedTarget, from_speculators: bool = False
) -> Eagle3Config:
    """Read how a head uses the target from `source`, and the decoder's sizes from `layers`.

    They are one file in the authors' layout. `from_speculators`: the folder is in that format, where layer ids are
    vLLM's, and a `norm_before_residual` that is left out means true, as the engines that serve them read it.

    Raises:
        CheckpointError: a malformed key, or one that does not fit the target.
    """
    eagle = source.section("eagle_config")
    eagle.require(EAGLE_CONFIG)
    eagle.taken.add("parallel_draft_heads_num_layers")  # of the heads that a parallel_draft_step above 1 would have
    source.taken.update(("bias", "fusion_bias", "num_eagle_features", "target_model_type"))  # for tools
    model = drafter_config(layers, target, "llama")
    aux_layers: tuple[int, ...] = ()
    if eagle.boolean("use_aux_hidden_state", True):
        listed = eagle.integers("eagle_aux_hidden_state_layer_ids")
        if listed is None:
            listed = source.integers("eagle_aux_hidden_state_layer_ids")
        if listed is None:
            aux_layers = default_aux_layers(target.num_layers)
        else:
            aux_layers = listed if from_speculators else aux_layers_listed(listed, target.num_layers)
        check_aux_layers(aux_layers, target, source.name)
    return Eagle3Config(
        model=model,
        target_hidden_size=source.integer("target_hidden_size", target.hidden_size),
        draft_vocab_size=source.integer("draft_vocab_size", model.vocab_size),
        aux_layers=aux_layers,
        norm_before_residual=_either(source, "norm_before_residual", from_speculators),
        norm_output=_either(source, "norm_output", False),
    )


def recognise_peagle(source: ConfigSource, checkpoint: CheckpointFolder) -> DrafterFormat | None:
    """By the hidden state of its masked rows, or by the key that asks for them. Otherwise it looks like EAGLE-3."""
    if "ptd_token_id" in source.values and source.values.get("parallel_drafting"):
        return DrafterFormat("peagle", "authors", "config.json has parallel_drafting and ptd_token_id")
    for name in ("mask_hidden", "model.mask_hidden"):
        if name in checkpoint:
            return DrafterFormat("peagle", "authors", f"tensor {name}")
    return None


def recognise_eagle3(source: ConfigSource, checkpoint: CheckpointFolder) -> DrafterFormat | None:
    """By its architecture's name, else by the authors' name for the first layer."""
    for name in source.strings("architectures"):
        if "eagle3" in name.lower():
            return DrafterFormat("eagle3", "authors", f"architecture {name}")
    for name in ("midlayer.mlp.down_proj.weight", "model.midlayer.mlp.down_proj.weight"):
        if name in checkpoint:
            return DrafterFormat("eagle3", "authors", f"tensor {name}")
    return None


def load_eagle3(opened: DrafterFolder, target: DraftedTarget) -> Eagle3Head:
    """Read a head whose first layer is `midlayer.*` (the authors' name) or `layers.0.*`.

    Raises:
        CheckpointError: a missing tensor, one of another shape, or a head that does not fit the target.
    """
    return Eagle3Head(*_read(opened, target))


def load_peagle(opened: DrafterFolder, target: DraftedTarget) -> PEagleHead:
    """Read an EAGLE-3 head with `mask_hidden`, and the token of its masked rows: `ptd_token_id`, or `mask_token_id`.

    Raises:
        CheckpointError: as `load_eagle3`; or no mask token, or one outside the target's vocabulary.
    """
    folder, source = opened.checkpoint, opened.head
    source.require({"parallel_drafting": True})
    source.taken.add("num_depths")  # of its training
    key = "mask_token_id" if source.has("mask_token_id") else "ptd_token_id"
    mask_token_id = source.integer(key)
    if mask_token_id >= target.vocab_size:
        raise source.fail(key, f"is {mask_token_id}, the target's vocabulary has {target.vocab_size}")
    config, weights, layers = _read(opened, target)
    size = max(1, len(config.aux_layers)) * config.target_hidden_size
    name = "model.mask_hidden" if "model.mask_hidden" in folder else "mask_hidden"
    given = folder.tensors[name].shape if name in folder else ()
    shape = given if given in ((1, size), (1, 1, size)) else (size,)  # all three are in use
    return PEagleHead(config, weights, layers, mask_token_id, folder.weight(name, shape).view(size))


def _read(opened: DrafterFolder, target: DraftedTarget) -> tuple[Eagle3Config, Eagle3Weights, list[DecoderLayer]]:
    folder, source = opened.checkpoint, opened.head
    folder.ignore(IGNORED)
    config = eagle3_config(source, opened.layers, target, from_speculators=opened.format.layout == "speculators")
    model = config.model
    hidden, vocabulary = model.hidden_size, target.vocab_size
    check_same("hidden size", config.target_hidden_size, target.hidden_size, source.name)
    check_same("vocabulary", model.vocab_size, vocabulary, source.name)
    prefix = "model." if "model.norm.weight" in folder else ""
    layer_names = [f"{prefix}layers.{i}" for i in range(model.num_layers)]
    if f"{prefix}midlayer.mlp.down_proj.weight" in folder:
        layer_names[0] = f"{prefix}midlayer"
    layers = [
        load_decoder_layer(folder, name, model, input_size=2 * hidden if i == 0 else None)
        for i, name in enumerate(layer_names)
    ]
    aux_size = max(1, len(config.aux_layers)) * config.target_hidden_size
    takes_hidden_as_it_is = not config.aux_layers and hidden == config.target_hidden_size
    fc, fc_bias = None, folder.optional_weight(f"{prefix}fc.bias", (hidden,))
    if not takes_hidden_as_it_is or f"{prefix}fc.weight" in folder:
        fc = load_matrix(folder, [f"{prefix}fc.weight"], [(hidden, aux_size)])
    # hidden_norm is part of the first layer in the authors' folders; older ones have it at the top level.
    norm_name = f"{layer_names[0]}.hidden_norm.weight"
    lm_head_name = "lm_head.weight" if "lm_head.weight" in folder else f"{prefix}lm_head.weight"
    weights = Eagle3Weights(
        embed_tokens=shared_or_own(
            folder, f"{prefix}embed_tokens.weight", target, target.embed_tokens, vocabulary, hidden
        ),
        hidden_norm=folder.weight(norm_name if norm_name in folder else f"{prefix}hidden_norm.weight", (hidden,)),
        norm=folder.weight(f"{prefix}norm.weight", (hidden,)),
        lm_head=shared_or_own(folder, lm_head_name, target, target.lm_head, config.draft_vocab_size, hidden),
        fc=None if fc is None else fc._replace(bias=fc_bias),
        input_norm=_norm_before_fc(folder, prefix, source, aux_size),
        fc_norms=_fc_norms(folder, prefix, source, config),
        draft_to_target=draft_to_target(folder, config.draft_vocab_size, vocabulary),
    )
    return config, weights, layers


def _either(source: ConfigSource, key: str, default: bool) -> bool:
    """A switch at the top level or in `eagle_config`; both are in use."""
    return source.boolean(key, source.section("eagle_config").boolean(key, default))


def _norm_before_fc(folder: CheckpointFolder, prefix: str, source: ConfigSource, aux_size: int) -> Tensor | None:
    asked = _either(source, "norm_before_fc", False)
    return folder.weight(f"{prefix}input_norm.weight", (aux_size,)) if asked else None


def _fc_norms(folder: CheckpointFolder, prefix: str, source: ConfigSource, config: Eagle3Config) -> tuple[Tensor, ...]:
    if not _either(source, "fc_norm", False):
        return ()
    names = [f"{prefix}fc_norm.{i}.weight" for i in range(len(config.aux_layers))]
    return tuple(folder.weight(name, (config.target_hidden_size,)) for name in names)


READER = DrafterReader("eagle3", recognise_eagle3, load_eagle3)
PEAGLE_READER = DrafterReader("peagle", recognise_peagle, load_peagle)
