"""Reads DFlash2 folders, in the layout of `speculators` and in the authors' (z-lab)."""

from __future__ import annotations

from collections.abc import Iterator

from specgraph.validation import Range
from specgraph_models.checkpoints.config_source import ConfigSource
from specgraph_models.checkpoints.dflash import read_block
from specgraph_models.checkpoints.drafter import DrafterFolder
from specgraph_models.checkpoints.folder import CheckpointFolder
from specgraph_models.checkpoints.formats import DrafterFormat, Reader, block_setting, block_tokens
from specgraph_models.dflash2 import Convolution, DFlash2Head, Selector

_SIZES = {
    "conv_kernel_size": (2, Range(1, 1 << 12)),
    "conv_group_size": (16, Range(1, 1 << 12)),
    "selector_rank": (256, Range(1, 1 << 16)),
    "selector_top_k": (16, Range(1, 1 << 12)),
}
"""The defaults of speculators, and the ranges. The authors' folders always have these keys."""


def load_dflash2(opened: DrafterFolder) -> DFlash2Head:
    """Read a head: DFlash's block, its layers' convolutions, and the selector that chooses among candidates."""
    block, folder = read_block(opened, sample_from_anchor=False), opened.checkpoint
    hidden, vocab_size = block.sizes.hidden_size, block.sizes.vocab_size
    opened.check_same("vocabulary", block.draft_vocab_size, vocab_size)
    taps, group, rank, top_k = (
        block_setting(opened.head, key).integer(key, default if opened.from_speculators else None, limits)
        for key, (default, limits) in _SIZES.items()
    )
    if hidden % group or top_k > vocab_size:
        key = "conv_group_size" if hidden % group else "selector_top_k"
        problem = f"does not fit: the hidden size is {hidden}, the vocabulary {vocab_size}"
        raise block_setting(opened.head, key).fail(key, problem)

    def convolution(name: str) -> Convolution:
        return Convolution(
            base=folder.weight(f"{name}.base_kernel", (2, taps, hidden)),
            projection=folder.matrix([f"{name}.kernel_projection.weight"], [(2 * taps * hidden // group, hidden)]),
        )

    layers = [f"layers.{i}" for i in range(block.sizes.num_layers)]
    selector = Selector(
        top_k=top_k,
        predecessor=folder.weight("candidate_selector.predecessor_codebook", (vocab_size, rank)),
        successor=folder.weight("candidate_selector.successor_codebook", (vocab_size, rank)),
        projection=folder.matrix(["candidate_selector.hidden_projection.weight"], [(rank, hidden)]),
    )
    convolutions = [(convolution(f"{name}.attention_conv"), convolution(f"{name}.mlp_conv")) for name in layers]
    return DFlash2Head(block, convolutions, selector)


def _recognised(source: ConfigSource, folder: CheckpointFolder) -> Iterator[DrafterFormat]:
    if source.has("dflash_config"):
        tokens = block_tokens(source, False)
        if source.section("dflash_config").has("selector_rank"):
            yield DrafterFormat("dflash2", "authors", "config.json has selector_rank", tokens)


DFLASH2 = Reader("dflash2", ("speculators", "authors"), _recognised, load_dflash2)
