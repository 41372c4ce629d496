"""Reads Domino folders: the authors' DFlash layout with `projector_type` domino and the tensors of the correction."""

from __future__ import annotations

from collections.abc import Iterator

from specgraph.validation import Range
from specgraph_models.checkpoints.config_source import ConfigSource
from specgraph_models.checkpoints.dflash import read_block
from specgraph_models.checkpoints.drafter import DrafterFolder
from specgraph_models.checkpoints.folder import CheckpointFolder
from specgraph_models.checkpoints.formats import DrafterFormat, Reader, block_setting, block_tokens
from specgraph_models.domino import Correction, DominoHead

_SIZES = {"gru_hidden_dim": Range(1, 1 << 16), "emb_dim": Range(1, 1 << 16), "pure_draft_prefix_len": Range(0, 1024)}


def load_domino(opened: DrafterFolder) -> DominoHead:
    """Read a head: DFlash's block and the correction."""
    block_setting(opened.head, "projector_type").require({"projector_type": "domino"})
    block, folder = read_block(opened, sample_from_anchor=False, key="shift_label"), opened.checkpoint
    state, inner, pure = (block_setting(opened.head, key).integer(key, limits=limits) for key, limits in _SIZES.items())
    hidden, draft_vocab_size = block.sizes.hidden_size, block.draft_vocab_size
    correction = Correction(
        taken=folder.matrix(["prefix_gru.weight_ih_l0"], [(3 * state, hidden)]),
        kept=folder.matrix(["prefix_gru.weight_hh_l0"], [(3 * state, state)]),
        inner=folder.matrix(["embed_proj.0.weight"], [(inner, hidden + state)]),
        output=folder.matrix(["embed_proj.2.weight"], [(draft_vocab_size, inner)]),
    )
    return DominoHead(block, correction, pure)


def _recognised(source: ConfigSource, folder: CheckpointFolder) -> Iterator[DrafterFormat]:
    if source.has("dflash_config"):
        section = source.section("dflash_config")
        if "domino" in (section.values.get("projector_type"), source.values.get("projector_type")):
            tokens = block_tokens(source, False, "shift_label")
            yield DrafterFormat("domino", "authors", "config.json has projector_type domino", tokens)


DOMINO = Reader("domino", ("authors",), _recognised, load_domino)
