"""Reads the block of DFlash folders and of the formats built on DFlash, in the authors' layout (z-lab/*-DFlash) and in
that of `speculators`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from specgraph_models.checkpoints.config_source import ConfigSource
from specgraph_models.checkpoints.drafter import DrafterFolder
from specgraph_models.checkpoints.files import shown
from specgraph_models.checkpoints.folder import CheckpointFolder
from specgraph_models.checkpoints.formats import DrafterFormat, Reader, anchor_predicts, block_setting, block_tokens
from specgraph_models.checkpoints.llama import load_decoder_layer
from specgraph_models.checkpoints.model_config import require_full_attention
from specgraph_models.decoder import AuxWeights
from specgraph_models.dflash import BlockParts, DFlashHead


def load_dflash(opened: DrafterFolder) -> DFlashHead:
    """Read a head that consists of its block alone."""
    return DFlashHead(read_block(opened, sample_from_anchor=False))


def read_block(opened: DrafterFolder, sample_from_anchor: bool, key: str = "sample_from_anchor") -> BlockParts:
    """Read a block from the authors' config.json (`dflash_config`, and the decoder's keys beside it), or speculators'.

    Args:
        key: the key that tells if the anchor's row predicts a token.
        sample_from_anchor: its value in a folder without the key.
    """
    folder, head, layers, target = opened.checkpoint, opened.head, opened.layers, opened.target
    authors = head.section("dflash_config")
    if opened.from_speculators:
        aux_layers = head.integers("aux_hidden_state_layer_ids") or ()
        opened.check_aux_layers(aux_layers)
    else:
        aux_layers = _outputs_of(block_setting(head, "target_layer_ids"), target.num_layers)
    head.require({"num_target_layers": target.num_layers})
    authors.require({"use_aux_hidden_state": True, "causal": False})
    layers.require({"is_causal": False})
    sizes = opened.decoder_config("qwen3")
    if any(sizes.sliding) and not _never_causal(head, layers, authors):
        raise layers.fail(
            "layer_types", "has sliding_attention, which is causal inside a block in this format; not supported here"
        )
    require_full_attention(sizes, layers.name)
    opened.check_same("hidden size", head.integer("target_hidden_size", target.hidden_size), target.hidden_size)
    # DFlash's attention has these norms, also if the configuration names an architecture without them.
    sizes = replace(sizes, qk_norm=sizes.qk_norm or "layers.0.self_attn.q_norm.weight" in folder)
    hidden, draft_vocab_size = sizes.hidden_size, head.integer("draft_vocab_size", sizes.vocab_size)
    weights = AuxWeights(
        embed_tokens=opened.embedding("embed_tokens.weight", hidden),
        fc=folder.matrix(["fc.weight"], [(hidden, len(aux_layers) * target.hidden_size)]),
        hidden_norm=folder.weight("hidden_norm.weight", (hidden,)),
        norm=folder.weight("norm.weight", (hidden,)),
        lm_head=opened.lm_head("lm_head.weight", draft_vocab_size, hidden),
        draft_to_target=opened.draft_to_target(draft_vocab_size),
    )
    return BlockParts(
        sizes,
        weights,
        [load_decoder_layer(folder, f"layers.{i}", sizes) for i in range(sizes.num_layers)],
        aux_layers,
        block_size=block_setting(head, "block_size").integer("block_size"),
        mask_token_id=opened.mask_token(block_setting(head, "mask_token_id"), "mask_token_id"),
        sample_from_anchor=anchor_predicts(head, sample_from_anchor, key),
    )


def _never_causal(head: ConfigSource, layers: ConfigSource, authors: ConfigSource) -> bool:
    """Return True if a key makes sliding layers see the whole block, as the other layers do.

    Without such a key a sliding layer is causal, and the others are not. Source: the authors' attention, and vLLM's
    `_dflash_layer_causal`; speculators has a key of its own.
    """
    said = head.boolean("sliding_window_non_causal", False)
    return said or not all(source.boolean(key, True) for source, key in ((layers, "is_causal"), (authors, "causal")))


def _outputs_of(authors: ConfigSource, num_layers: int) -> tuple[int, ...]:
    """Return `target_layer_ids` as aux layers.

    The output of layer i is the input of layer i + 1, so its aux layer is i + 1. The last layer is the exception: its
    aux layer is num_layers + 1, the state *after* the final norm. The heads were trained on transformers'
    `hidden_states[i + 1]`, with a normalised last entry (the same in transformers' DFlash generator, and in SGLang
    since its pull request 39776). The ids of speculators count otherwise: it trains on states captured by vLLM, where
    num_layers is the state before the norm.
    """
    listed, last = authors.integers("target_layer_ids") or (), num_layers - 1
    if not listed or not all(0 <= i <= last for i in listed):
        problem = f"is {shown(list(listed))}; it should list layers of the target, 0 to {last}"
        raise authors.fail("target_layer_ids", problem)
    return tuple(i + 2 if i == last else i + 1 for i in listed)


def _recognised(source: ConfigSource, folder: CheckpointFolder) -> Iterator[DrafterFormat]:
    if source.has("dflash_config"):
        yield DrafterFormat("dflash", "authors", "config.json has dflash_config", block_tokens(source, False))


DFLASH = Reader("dflash", ("speculators", "authors"), _recognised, load_dflash)
