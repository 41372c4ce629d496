"""Reading DFlash folders: the authors' layout (z-lab/*-DFlash), and that of `speculators`."""

from __future__ import annotations

from dataclasses import replace

from specgraph.checkpoints.config_source import ConfigSource
from specgraph.checkpoints.drafter import DrafterFolder
from specgraph.checkpoints.files import shown
from specgraph.checkpoints.llama import load_decoder_layer
from specgraph.checkpoints.model_config import require_full_attention
from specgraph.models.dflash import DFlashConfig, DFlashHead, DFlashWeights


def dflash_config(opened: DrafterFolder) -> DFlashConfig:
    """Read the authors' config.json (`dflash_config`, decoder keys beside it) or that of speculators."""
    head, layers, target = opened.head, opened.layers, opened.target
    authors = head.section("dflash_config")
    if head.has("dflash_config"):
        aux_layers = _outputs_of(authors, target.num_layers)
    else:
        aux_layers = head.integers("aux_hidden_state_layer_ids") or ()
        opened.check_aux_layers(aux_layers)
    head.require({"sample_from_anchor": False, "num_target_layers": target.num_layers})
    authors.require({"use_aux_hidden_state": True, "causal": False})
    layers.require({"is_causal": False})
    model = opened.decoder_config("qwen3", absent_keys=True)
    if any(model.sliding) and not _never_causal(head, layers, authors):
        raise layers.fail(
            "layer_types", "has sliding_attention, which is causal inside a block in this format; not supported here"
        )
    require_full_attention(model, layers.name)
    return DFlashConfig(
        model=model,
        target_hidden_size=head.integer("target_hidden_size", target.hidden_size),
        draft_vocab_size=head.integer("draft_vocab_size", model.vocab_size),
        aux_layers=aux_layers,
        block_size=(authors if authors.has("block_size") else head).integer("block_size"),
        mask_token_id=opened.mask_token(authors if authors.has("mask_token_id") else head, "mask_token_id"),
    )


def _never_causal(head: ConfigSource, layers: ConfigSource, authors: ConfigSource) -> bool:
    """Return whether a key says that sliding layers see the whole block too.

    Without one, a sliding layer is causal and the others are not (the authors' attention, vLLM's
    `_dflash_layer_causal`; speculators has a key of its own).
    """
    said = head.boolean("sliding_window_non_causal", False)
    return said or not all(source.boolean(key, True) for source, key in ((layers, "is_causal"), (authors, "causal")))


def _outputs_of(authors: ConfigSource, num_layers: int) -> tuple[int, ...]:
    """Return `target_layer_ids` as aux layers.

    Layer i's output is what enters layer i + 1, so its aux layer is i + 1. The last layer's is the state *after* the
    final norm, num_layers + 1: the heads were trained on transformers' `hidden_states[i + 1]`, whose last entry is
    normalised (also in transformers' DFlash generator, and in SGLang since its pull request 39776). The ids of
    speculators count otherwise: it trains on states captured by vLLM, where num_layers is the state before the norm.
    """
    listed, last = authors.integers("target_layer_ids") or (), num_layers - 1
    if not listed or not all(0 <= i <= last for i in listed):
        problem = f"is {shown(list(listed))}; it should list layers of the target, 0 to {last}"
        raise authors.fail("target_layer_ids", problem)
    return tuple(i + 2 if i == last else i + 1 for i in listed)


def load_dflash(opened: DrafterFolder) -> DFlashHead:
    """Read a head."""
    folder, config = opened.checkpoint, dflash_config(opened)
    # Its attention has these norms whatever architecture the configuration names.
    model = replace(config.model, qk_norm=config.model.qk_norm or "layers.0.self_attn.q_norm.weight" in folder)
    hidden = model.hidden_size
    opened.check_same("hidden size", config.target_hidden_size, opened.target.hidden_size)
    fc = folder.matrix(["fc.weight"], [(hidden, len(config.aux_layers) * config.target_hidden_size)])
    weights = DFlashWeights(
        embed_tokens=opened.embedding("embed_tokens.weight", hidden),
        fc=fc,
        hidden_norm=folder.weight("hidden_norm.weight", (hidden,)),
        norm=folder.weight("norm.weight", (hidden,)),
        lm_head=opened.lm_head("lm_head.weight", config.draft_vocab_size, hidden),
        draft_to_target=opened.draft_to_target(config.draft_vocab_size),
    )
    layers = [load_decoder_layer(folder, f"layers.{i}", model) for i in range(model.num_layers)]
    return DFlashHead(replace(config, model=model), weights, layers)
