"""Reads Domino folders: the authors' DFlash layout with `projector_type` domino and the tensors of the correction."""

from __future__ import annotations

from specgraph_models.checkpoints.dflash import read_block
from specgraph_models.checkpoints.drafter import DrafterFolder
from specgraph_models.checkpoints.formats import block_setting
from specgraph_models.domino import Correction, DominoHead


def load_domino(opened: DrafterFolder) -> DominoHead:
    """Read a head: DFlash's block and the correction."""
    block_setting(opened.head, "projector_type").require({"projector_type": "domino"})
    block, folder = read_block(opened, sample_from_anchor=False, key="shift_label"), opened.checkpoint
    state, inner, pure = (
        block_setting(opened.head, key).integer(key) for key in ("gru_hidden_dim", "emb_dim", "pure_draft_prefix_len")
    )
    hidden, draft_vocab_size = block.sizes.hidden_size, block.draft_vocab_size
    correction = Correction(
        taken=folder.matrix(["prefix_gru.weight_ih_l0"], [(3 * state, hidden)]),
        kept=folder.matrix(["prefix_gru.weight_hh_l0"], [(3 * state, state)]),
        inner=folder.matrix(["embed_proj.0.weight"], [(inner, hidden + state)]),
        output=folder.matrix(["embed_proj.2.weight"], [(draft_vocab_size, inner)]),
    )
    return DominoHead(block, correction, pure)
