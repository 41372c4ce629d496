"""Reads EAGLE-3 and P-EAGLE folders, in their authors' layouts (yuhuili/EAGLE3-*, amazon/*-P-EAGLE) and in that of
`speculators`."""

from __future__ import annotations

from collections.abc import Iterator

from specgraph_models.checkpoints.config_source import ConfigSource, holder_of
from specgraph_models.checkpoints.drafter import DrafterFolder
from specgraph_models.checkpoints.folder import CheckpointFolder
from specgraph_models.checkpoints.formats import DrafterFormat, Reader
from specgraph_models.checkpoints.llama import load_decoder_layer
from specgraph_models.config import ModelConfig
from specgraph_models.decoder import AuxWeights
from specgraph_models.eagle3 import Eagle3Head, PEagleHead
from specgraph_models.layers import DecoderLayer

EAGLE_CONFIG = {
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "has_lm_head": True,
    "norm_before_residual": False,
    "norm_output": False,
    "fc_norm": False,
}
"""Keys of `eagle_config` that change the computation, each with the only value that is supported. Host engines read the
last three at the top level alone."""


def _aux_layers_listed(listed: tuple[int, ...] | None, num_layers: int, from_speculators: bool) -> tuple[int, ...]:
    """Return the aux layers of a head that lists these `eagle_aux_hidden_state_layer_ids`.

    A head without a list, or with an empty one (ModelOpt's default), takes the inputs of an early, the middle and a
    late layer. The authors' layout counts in two ways, and no key tells which. SpecForge lists layers for their
    *output*, by default 1, n / 2 - 1 and n - 4 (its pull request 239). Others, such as vLLM, list layers for their
    *input*. The output of layer i is the input of layer i + 1, so SpecForge's default names the same states, each id
    one less. Only this default as a whole is recognised. SGLang decides by the first id (its pull request 25454; since
    32334 a list that begins with 24 means inputs). In the layout of speculators the ids are vLLM's.
    """
    inputs = (2, num_layers // 2, num_layers - 3)
    outputs = tuple(layer - 1 for layer in inputs)
    return inputs if not listed or (listed == outputs and not from_speculators) else listed


def load_eagle3(opened: DrafterFolder) -> Eagle3Head:
    """Read a head. Its first layer is `midlayer.*` (the authors' name) or `layers.0.*`."""
    return Eagle3Head(*_parts(opened), **_switches(opened))


def load_peagle(opened: DrafterFolder) -> PEagleHead:
    """Read an EAGLE-3 head with `mask_hidden`. Its masked rows' token is `mask_token_id` or `ptd_token_id`."""
    folder, source = opened.checkpoint, opened.head
    source.require({"parallel_drafting": True})
    source.taken.add("num_depths")  # used in training only
    key = "mask_token_id" if source.has("mask_token_id") else "ptd_token_id"
    mask_token_id = opened.mask_token(source, key)
    sizes, weights, layers, aux_layers = _parts(opened)
    size = max(1, len(aux_layers)) * opened.target.hidden_size
    name = "model.mask_hidden" if "model.mask_hidden" in folder else "mask_hidden"
    given = folder.tensors[name].shape if name in folder else ()
    shape = given if given in ((1, size), (1, 1, size)) else (size,)  # published folders have all three shapes
    mask_hidden = folder.weight(name, shape).view(size)
    return PEagleHead(
        sizes, weights, layers, aux_layers, mask_token_id=mask_token_id, mask_hidden=mask_hidden, **_switches(opened)
    )


def _switches(opened: DrafterFolder) -> dict[str, bool]:
    """Read the fields of a head that tell where it normalises."""
    return {key: opened.head.boolean(key, False) for key in ("norm_before_residual", "norm_output")}


def _aux_layers(opened: DrafterFolder) -> tuple[int, ...]:
    """Read the states of the target that a head takes. Empty if it takes the final hidden state alone."""
    source, target = opened.head, opened.target
    eagle = source.section("eagle_config")
    eagle.require(EAGLE_CONFIG)
    eagle.taken.add("parallel_draft_heads_num_layers")  # about heads that exist with parallel_draft_step above 1 only
    if not eagle.boolean("use_aux_hidden_state", True):
        return ()
    key = "eagle_aux_hidden_state_layer_ids"
    listed = holder_of(key, eagle, source).integers(key)
    aux_layers = _aux_layers_listed(listed, target.num_layers, opened.from_speculators)
    opened.check_aux_layers(aux_layers)
    return aux_layers


def _parts(opened: DrafterFolder) -> tuple[ModelConfig, AuxWeights, list[DecoderLayer], tuple[int, ...]]:
    """Read a head's sizes, tensors, layers and aux layers."""
    folder, source, target_hidden = opened.checkpoint, opened.head, opened.target.hidden_size
    source.taken.update(("bias", "fusion_bias", "num_eagle_features", "target_model_type"))  # read by tools only
    default = "qwen3" if opened.from_speculators else "llama"
    prefix = "model." if "model.norm.weight" in folder else ""
    first = f"{prefix}{'midlayer' if f'{prefix}midlayer.mlp.down_proj.weight' in folder else 'layers.0'}"
    sizes, layer_names = opened.eagle_layers(first, prefix, default)
    aux_layers = _aux_layers(opened)
    opened.check_same("hidden size", source.integer("target_hidden_size", target_hidden), target_hidden)
    hidden, draft_vocab_size = sizes.hidden_size, source.integer("draft_vocab_size", sizes.vocab_size)
    layers = [
        load_decoder_layer(folder, name, sizes, input_size=2 * hidden if i == 0 else None)
        for i, name in enumerate(layer_names)
    ]
    aux_size = max(1, len(aux_layers)) * target_hidden
    fc = None
    if aux_layers or hidden != target_hidden:
        stored = folder.tensors.get(f"{prefix}fc.weight")
        if stored is not None and stored.shape[1:] == (max(1, len(aux_layers)) * hidden,):  # fits the head's own size
            opened.check_same("hidden size", hidden, target_hidden)
        fc = folder.matrix([f"{prefix}fc.weight"], [(hidden, aux_size)])
        fc = fc._replace(bias=folder.optional_weight(f"{prefix}fc.bias", (hidden,)))
    input_norm = None
    if holder_of("norm_before_fc", source, source.section("eagle_config")).boolean("norm_before_fc", False):
        input_norm = folder.weight(f"{prefix}input_norm.weight", (aux_size,))
    aux_norms = len(aux_layers) if source.boolean("fc_norm", False) else 0
    # In the authors' folders hidden_norm is part of the first layer. Older folders have it at the top level.
    norm = f"{layer_names[0]}.hidden_norm.weight"
    lm_head = "lm_head.weight" if "lm_head.weight" in folder else f"{prefix}lm_head.weight"
    embed_tokens = opened.embedding(f"{prefix}embed_tokens.weight", hidden)
    own = embed_tokens is not opened.target.embed_tokens
    if sizes.tie_word_embeddings and own and lm_head not in folder and not opened.from_speculators:
        problem = "is true, and the folder has an embedding of its own and no lm_head: engines differ on which it means"
        raise opened.layers.fail("tie_word_embeddings", problem)
    weights = AuxWeights(
        embed_tokens=embed_tokens,
        fc=fc,
        hidden_norm=folder.weight(norm if norm in folder else f"{prefix}hidden_norm.weight", (hidden,)),
        norm=folder.weight(f"{prefix}norm.weight", (hidden,)),
        lm_head=opened.lm_head(lm_head, draft_vocab_size, hidden),
        draft_to_target=opened.draft_to_target(draft_vocab_size),
        input_norm=input_norm,
        fc_norms=tuple(folder.weight(f"{prefix}fc_norm.{i}.weight", (target_hidden,)) for i in range(aux_norms)),
    )
    return sizes, weights, layers, aux_layers


def _peagle_recognised(source: ConfigSource, folder: CheckpointFolder) -> Iterator[DrafterFormat]:
    if "ptd_token_id" in source.values and source.values.get("parallel_drafting"):
        yield DrafterFormat("peagle", "authors", "config.json has parallel_drafting and ptd_token_id")
    for name in ("mask_hidden", "model.mask_hidden"):  # for masked rows; a head without it is EAGLE-3
        if name in folder:
            yield DrafterFormat("peagle", "authors", f"tensor {name}")


def _eagle3_recognised(source: ConfigSource, folder: CheckpointFolder) -> Iterator[DrafterFormat]:
    for name in source.strings("architectures"):
        if "eagle3" in name.lower():
            yield DrafterFormat("eagle3", "authors", f"architecture {name}")
    for name in ("midlayer.mlp.down_proj.weight", "model.midlayer.mlp.down_proj.weight"):
        if name in folder:
            yield DrafterFormat("eagle3", "authors", f"tensor {name}")


PEAGLE = Reader("peagle", ("speculators", "authors"), _peagle_recognised, load_peagle)
EAGLE3 = Reader("eagle3", ("speculators", "authors"), _eagle3_recognised, load_eagle3)
