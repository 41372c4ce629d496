"""Which drafter a checkpoint folder holds: each kind of drafter brings a reader, and says by what it is recognised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specgraph.errors import CheckpointError
from specgraph.models.checkpoint_folder import CheckpointFolder
from specgraph.models.config_source import ConfigSource
from specgraph.models.llama import LlamaTarget
from specgraph.models.protocol import DraftHead, ParallelHead
from specgraph.models.speculators_format import is_speculators, speculators_source


@dataclass(frozen=True, slots=True)
class DrafterFormat:
    """What a drafter's folder holds."""

    algorithm: str
    """eagle, eagle3, mtp, dflash, draft_model, ..."""
    layout: str
    """Whose names the folder uses: authors (of the algorithm), speculators, transformers, or an MTP family's."""
    evidence: str
    """What told so: a key of config.json, or tensors."""
    num_speculative_tokens: int | None = None
    """How many tokens the folder suggests to draft."""

    def __str__(self) -> str:
        return f"{self.algorithm}, {self.layout} layout ({self.evidence})"


@dataclass(frozen=True, slots=True)
class DrafterFolder:
    """A drafter's folder, opened."""

    checkpoint: CheckpointFolder
    head: ConfigSource
    """The top level of config.json: how the head uses its target."""
    layers: ConfigSource
    """Where the draft decoder's sizes are: the same, or a section of it."""
    format: DrafterFormat
    num_modules: int | None = None
    """MTP modules that the caller asked for; None for all."""


@dataclass(frozen=True, slots=True)
class DrafterReader:
    """What one kind of drafter brings to be loaded."""

    algorithm: str
    recognise: Callable[[ConfigSource, CheckpointFolder], DrafterFormat | None]
    """Looks at a folder in any layout but that of `speculators`, which names its algorithm itself."""
    load: Callable[[DrafterFolder, LlamaTarget], DraftHead | ParallelHead]
    """Raises CheckpointError: a missing or misshapen tensor, or a head that does not fit the target."""
    speculators: bool = True
    """Whether the `speculators` format has this algorithm, under the same name."""


def detect_format(
    source: ConfigSource, checkpoint: CheckpointFolder, readers: Sequence[DrafterReader]
) -> DrafterFormat:
    """Find out what a folder holds; the first reader that recognises it wins.

    Raises:
        CheckpointError: nothing that is known here; the message says what was looked at.
    """
    if is_speculators(source):
        return _speculators_format(source, [reader.algorithm for reader in readers if reader.speculators])
    for reader in readers:
        found = reader.recognise(source, checkpoint)
        if found is not None:
            return found
    raise CheckpointError(
        f"{source.name}: no known drafter (model_type {source.values.get('model_type')!r}, "
        f"architectures {architectures(source)}, {len(checkpoint.files)} tensors, such as "
        f"{', '.join(checkpoint.names()[:3])}); known are {', '.join(reader.algorithm for reader in readers)}"
    )


def architectures(source: ConfigSource) -> list[str]:
    """`architectures` of a configuration; empty when absent."""
    return [str(name) for name in source.values.get("architectures") or []]


def _speculators_format(source: ConfigSource, known: Sequence[str]) -> DrafterFormat:
    found = speculators_source(source)
    if found.algorithm not in known:
        problem = f"is {found.algorithm!r}; supported are {', '.join(sorted(known))}"
        raise source.fail("speculators_model_type", problem)
    evidence = f"speculators_model_type is {found.algorithm}"
    return DrafterFormat(found.algorithm, "speculators", evidence, found.num_speculative_tokens)
