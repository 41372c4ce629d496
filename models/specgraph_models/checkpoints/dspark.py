"""Reads DSpark folders, in the layout of `speculators` and in the authors' (DeepSpec, deepseek-ai/dspark_*)."""

from __future__ import annotations

from collections.abc import Iterator

from specgraph.validation import Range
from specgraph_models.checkpoints.config_source import ConfigSource
from specgraph_models.checkpoints.dflash import read_block
from specgraph_models.checkpoints.drafter import DrafterFolder
from specgraph_models.checkpoints.files import shown
from specgraph_models.checkpoints.folder import CheckpointFolder
from specgraph_models.checkpoints.formats import DrafterFormat, Reader, block_sections, block_setting, block_tokens
from specgraph_models.dflash import BlockParts
from specgraph_models.dspark import ConfidenceHead, DSparkHead, MarkovHead
from specgraph_models.layers import Weight

_VARIANTS = ("vanilla", "gated", "rnn")
_RANKS = Range(1, 1 << 16)


def load_dspark(opened: DrafterFolder) -> DSparkHead:
    """Read a head: DFlash's block, the Markov head and the confidence head."""
    block, speculators = read_block(opened, sample_from_anchor=True), opened.from_speculators
    block_setting(opened.head, "projector_type").require({"projector_type": "dspark"})
    opened.head.section("dflash_config").taken.update(("attention_mode", "confidence_head_alpha"))  # SpecForge's checks
    rank = block_setting(opened.head, "markov_rank").integer("markov_rank", 256 if speculators else None, _RANKS)
    markov = _markov(opened, block, rank)
    return DSparkHead(block, markov, _confidence(opened, block, rank))


def _markov(opened: DrafterFolder, block: BlockParts, rank: int) -> MarkovHead:
    folder, source = opened.checkpoint, block_setting(opened.head, "markov_head_type")
    variant, hidden = source.string("markov_head_type", "vanilla"), block.sizes.hidden_size
    if variant not in _VARIANTS:
        raise source.fail("markov_head_type", f"is {shown(variant)}; supported are {', '.join(_VARIANTS)}")
    gate = cell = None
    if variant == "gated":
        gate = _biased(folder, "markov_head.gate_proj", rank, hidden + rank)
    if variant == "rnn":
        cell = _biased(folder, "markov_head.joint_proj", 3 * rank, 2 * rank + hidden)
    return MarkovHead(
        embed=folder.weight("markov_head.markov_w1.weight", (block.sizes.vocab_size, rank)),
        output=folder.matrix(["markov_head.markov_w2.weight"], [(block.draft_vocab_size, rank)]),
        gate=gate,
        cell=cell,
    )


def _biased(folder: CheckpointFolder, name: str, rows: int, columns: int) -> Weight:
    return folder.matrix([f"{name}.weight"], [(rows, columns)])._replace(bias=folder.weight(f"{name}.bias", (rows,)))


def _confidence(opened: DrafterFolder, block: BlockParts, rank: int) -> ConfidenceHead | None:
    """Return the confidence head. None if config.json disables it. It has a bias if the folder has that tensor."""
    folder, name, hidden = opened.checkpoint, "confidence_head.proj", block.sizes.hidden_size
    head, with_markov = opened.head, "confidence_head_with_markov"
    enabled = all(
        block_setting(head, key).boolean(key, True) for key in ("enable_confidence_head", "use_confidence_head")
    )
    reads_token = block_setting(head, with_markov).boolean(with_markov, True)
    if not enabled:
        return None
    weight = folder.weight(f"{name}.weight", (1, hidden + rank if reads_token else hidden))
    bias = folder.weight(f"{name}.bias", (1,)).float() if f"{name}.bias" in folder else None
    return ConfidenceHead(weight.float(), bias)


def _recognised(source: ConfigSource, folder: CheckpointFolder) -> Iterator[DrafterFormat]:
    if any(section.has("markov_rank") for section in block_sections(source)):
        tokens = block_tokens(source, True)
        yield DrafterFormat("dspark", "authors", "config.json has markov_rank", tokens)


DSPARK = Reader("dspark", ("speculators", "authors"), _recognised, load_dspark)
