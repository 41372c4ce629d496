"""Reading DFlash folders: the authors' layout (z-lab/*-DFlash), and that of `speculators`."""

from __future__ import annotations

from specgraph.checkpoints.config_source import ConfigSource
from specgraph.checkpoints.fit import check_aux_layers, check_same, draft_to_target, drafter_config, shared_or_own
from specgraph.checkpoints.folder import CheckpointFolder
from specgraph.checkpoints.formats import DrafterFolder, DrafterFormat, DrafterReader
from specgraph.checkpoints.llama import load_decoder_layer
from specgraph.models.dflash import DFlashConfig, DFlashHead, DFlashWeights
from specgraph.models.llama import LlamaTarget


def dflash_config(head: ConfigSource, layers: ConfigSource, target: LlamaTarget) -> DFlashConfig:
    """Read the authors' config.json (z-lab/*-DFlash: `dflash_config`, decoder keys beside it) or that of speculators.

    The authors number a target layer by its own index and mean its output; aux state k is what *enters* layer k, so
    their i is k = i + 1. speculators stores k.

    Raises:
        CheckpointError: a malformed or missing key, or one that does not fit the target.
    """
    authors = head.section("dflash_config")
    if head.has("dflash_config"):
        listed = authors.integers("target_layer_ids")
        aux_layers = None if listed is None else tuple(i + 1 for i in listed)
    else:
        aux_layers = head.integers("aux_hidden_state_layer_ids")
    if not aux_layers:
        raise head.fail("target_layer_ids", "is missing or empty; it should list the target layers that feed the head")
    check_aux_layers(aux_layers, target, head.name)
    if head.boolean("sample_from_anchor", False):
        raise head.fail("sample_from_anchor", "is true; only blocks whose first row is the sampled token are supported")
    model = drafter_config(layers, target, "qwen3")
    mask = authors if authors.has("mask_token_id") else head
    mask_token_id = mask.integer("mask_token_id", minimum=0)
    if mask_token_id >= target.vocab_size:
        raise mask.fail("mask_token_id", f"is {mask_token_id}, the target's vocabulary has {target.vocab_size}")
    return DFlashConfig(
        model=model,
        target_hidden_size=head.integer("target_hidden_size", target.hidden_size),
        draft_vocab_size=head.integer("draft_vocab_size", model.vocab_size),
        aux_layers=aux_layers,
        block_size=(authors if authors.has("block_size") else head).integer("block_size", minimum=2),
        mask_token_id=mask_token_id,
    )


def recognise_dflash(source: ConfigSource, checkpoint: CheckpointFolder) -> DrafterFormat | None:
    """By its own section of config.json."""
    if not source.has("dflash_config"):
        return None
    holder = source if source.has("block_size") else source.section("dflash_config")
    tokens = holder.integer("block_size", minimum=2) - 1 if holder.has("block_size") else None
    return DrafterFormat("dflash", "authors", "config.json has dflash_config", tokens)


def load_dflash(opened: DrafterFolder, target: LlamaTarget) -> DFlashHead:
    """Read a head.

    Raises:
        CheckpointError: a missing tensor, one of another shape, or a head that does not fit the target.
    """
    folder, source = opened.checkpoint, opened.head
    config = dflash_config(source, opened.layers, target)
    model = config.model
    hidden, vocabulary = model.hidden_size, target.vocab_size
    check_same("hidden size", config.target_hidden_size, target.hidden_size, source.name)
    check_same("vocabulary", model.vocab_size, vocabulary, source.name)
    weights = DFlashWeights(
        embed_tokens=shared_or_own(folder, "embed_tokens.weight", target.embed_tokens, vocabulary, hidden),
        fc=folder.weight("fc.weight", (hidden, len(config.aux_layers) * config.target_hidden_size)),
        hidden_norm=folder.weight("hidden_norm.weight", (hidden,)),
        norm=folder.weight("norm.weight", (hidden,)),
        lm_head=shared_or_own(folder, "lm_head.weight", target.lm_head, config.draft_vocab_size, hidden),
        draft_to_target=draft_to_target(folder, config.draft_vocab_size, vocabulary),
    )
    layers = [load_decoder_layer(folder, f"layers.{i}", model) for i in range(model.num_layers)]
    return DFlashHead(config, weights, layers)


READER = DrafterReader("dflash", recognise_dflash, load_dflash)
