"""The format of a drafter's folder, and the reader of each algorithm's folders."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from specgraph.attention import AttentionLayer
from specgraph.draft.protocol import ModelHead
from specgraph_models.checkpoints.config_source import ConfigSource, holder_of
from specgraph_models.checkpoints.drafter import DrafterFolder
from specgraph_models.checkpoints.folder import CheckpointFolder
from specgraph_models.draft_vocab import CutHead


@dataclass(frozen=True, slots=True)
class DrafterFormat:
    """The format of a drafter's folder."""

    algorithm: str
    """The name of its reader."""
    layout: str
    """The naming that the folder follows: the algorithm's authors', speculators', transformers' or an MTP family's."""
    evidence: str
    """The key of config.json or the tensors that showed the format."""
    num_speculative_tokens: int | None = None
    """Draft tokens per propose that the folder suggests. None if it suggests no number."""

    def __str__(self) -> str:
        return f"{self.algorithm}, {self.layout} layout ({self.evidence})"


class LoadedHead(ModelHead, CutHead, Protocol):
    """A head that was read from a folder. Its positions can still be fewer than the checkpoint's."""

    def attention_shapes(self) -> Sequence[AttentionLayer]:
        """Return `attention_layers` with empty rotary tables."""
        ...

    def shorten(self, max_model_len: int) -> None:
        """Run with fewer positions. Only a head that was never captured may be shortened."""
        ...

    def rank_parts(self) -> frozenset[str]:
        """Return the names of the tensors in `weights` that are split over ranks. Every rank has the others whole."""
        ...


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads the folders of one algorithm."""

    algorithm: str
    layouts: tuple[str, ...]
    """The layouts that its folders may have."""
    recognised: Callable[[ConfigSource, CheckpointFolder], Iterator[DrafterFormat]]
    """Yields the formats that a folder may have, the surest first. It is not asked in the layout of speculators, where
    config.json names the algorithm."""
    load: Callable[[DrafterFolder], LoadedHead]


def block_sections(source: ConfigSource) -> list[ConfigSource]:
    """Return the sections that may have a block's settings, in the order in which they are read."""
    return [source.section("dflash_config"), source.section("dspark_config"), source]


def block_setting(source: ConfigSource, key: str) -> ConfigSource:
    """Return the section that has `key`: the authors' `dflash_config` or `dspark_config`, or the top level."""
    return holder_of(key, *block_sections(source))


def anchor_predicts(source: ConfigSource, default: bool, key: str = "sample_from_anchor") -> bool:
    """Return True if a block's first row, the anchor, predicts a token too. Domino's key for it is `shift_label`."""
    return block_setting(source, key).boolean(key, default)


def block_tokens(source: ConfigSource, default: bool, key: str = "sample_from_anchor") -> int | None:
    """Return the number of tokens that a block drafts: its rows, less one if the anchor predicts nothing.

    None if no key has the number of rows."""
    holder, predicts = block_setting(source, "block_size"), anchor_predicts(source, default, key)
    return holder.integer("block_size") - (not predicts) if holder.has("block_size") else None
