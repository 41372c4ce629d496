"""Which drafter a checkpoint folder holds: each kind of drafter brings a reader, and says by what it is recognised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specgraph.checkpoints.config_source import ConfigSource
from specgraph.checkpoints.folder import CheckpointFolder
from specgraph.errors import CheckpointError
from specgraph.models.llama import LlamaTarget
from specgraph.models.protocol import DraftHead, ParallelHead


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


@dataclass(frozen=True, slots=True)
class SpeculatorsSource:
    """The parts of a `speculators` configuration."""

    algorithm: str
    head: ConfigSource
    """The top level: how the head uses the target."""
    layers: ConfigSource
    """The draft decoder's sizes."""
    num_speculative_tokens: int | None
    """What the default proposal method asks for."""


def is_speculators(source: ConfigSource) -> bool:
    """Whether a config.json is in this format."""
    return source.has("speculators_model_type") or source.has("speculators_config")


def speculators_source(source: ConfigSource) -> SpeculatorsSource:
    """Take a configuration apart.

    Raises:
        CheckpointError: no algorithm, or no decoder configuration.
    """
    section = source.section("speculators_config")
    algorithm = source.string("speculators_model_type", "") or section.string("algorithm")
    if not source.has("transformer_layer_config"):
        raise source.fail("transformer_layer_config", "is missing; it should hold the draft decoder's configuration")
    return SpeculatorsSource(
        algorithm, source, source.section("transformer_layer_config"), _speculative_tokens(section)
    )


def _speculative_tokens(section: ConfigSource) -> int | None:
    methods = section.values.get("proposal_methods")
    if not isinstance(methods, list):
        return None
    default = section.string("default_proposal_method", "")
    mappings = [ConfigSource(m, f"{section.name}[proposal_methods]") for m in methods if isinstance(m, dict)]
    chosen = next((m for m in mappings if m.values.get("proposal_type") == default), mappings[0] if mappings else None)
    return chosen.integer("speculative_tokens") if chosen is not None and chosen.has("speculative_tokens") else None


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
