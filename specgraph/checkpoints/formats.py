"""Which drafter a checkpoint folder holds. Each kind of drafter has a reader, which also recognises its folders.

The `speculators` package has a folder format of its own, one config.json that embeds the decoder's and the verifier's:

speculators_model_type      eagle, eagle3, mtp, dflash, ...
transformer_layer_config    the draft decoder's own configuration, with its `model_type`
speculators_config          algorithm, proposal methods (how many tokens to draft), the verifier's name
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specgraph.checkpoints.config_source import ConfigSource
from specgraph.checkpoints.files import shown
from specgraph.checkpoints.fit import DraftedTarget
from specgraph.checkpoints.folder import CheckpointFolder
from specgraph.errors import CheckpointError
from specgraph.models.dflash import DFlashHead
from specgraph.models.draft_model import DraftModelHead
from specgraph.models.eagle import EagleHead
from specgraph.models.eagle3 import Eagle3Head
from specgraph.models.mtp import MtpHead


@dataclass(frozen=True, slots=True)
class DrafterFormat:
    """What a drafter's folder holds."""

    algorithm: str
    """eagle, eagle3, mtp, dflash, draft_model, ..."""
    layout: str
    """Whose names the folder uses: the algorithm's authors', speculators', transformers', or an MTP family's."""
    evidence: str
    """What it was recognised by: a key of config.json, or tensors."""
    num_speculative_tokens: int | None = None
    """Draft tokens per propose that the folder suggests; None when it suggests none."""

    def __str__(self) -> str:
        return f"{self.algorithm}, {self.layout} layout ({self.evidence})"


@dataclass(frozen=True, slots=True)
class DrafterFolder:
    """A drafter's folder, opened."""

    checkpoint: CheckpointFolder
    head: ConfigSource
    """The top level of config.json: how the head uses its target."""
    layers: ConfigSource
    """The draft decoder's sizes: the top level too, or a section of it."""
    format: DrafterFormat
    num_modules: int | None = None
    """Number of MTP modules that the caller asked for; None for all."""


LoadedHead = EagleHead | Eagle3Head | MtpHead | DFlashHead | DraftModelHead
"""The heads that readers make."""


@dataclass(frozen=True, slots=True)
class DrafterReader:
    """How one kind of drafter is recognised and loaded."""

    algorithm: str
    recognise: Callable[[ConfigSource, CheckpointFolder], DrafterFormat | None]
    """Recognises a folder, or returns None. Not asked about the `speculators` format, which names its algorithm."""
    load: Callable[[DrafterFolder, DraftedTarget], LoadedHead]
    """Raises CheckpointError: a missing or misshapen tensor, or a head that does not fit the target."""
    speculators: bool = True
    """Whether this algorithm also comes in the `speculators` format, under the same name."""


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
    """Split a configuration into its parts.

    Raises:
        CheckpointError: no algorithm, or no decoder configuration.
    """
    section = source.section("speculators_config")
    algorithm = source.string("speculators_model_type", "") or section.string("algorithm")
    if not source.has("transformer_layer_config"):
        raise source.fail("transformer_layer_config", "is missing; it should hold the draft decoder's configuration")
    section.taken.update(section.values)  # the rest is advice: the verifier's name, how many tokens to draft
    layers = source.section("transformer_layer_config")
    return SpeculatorsSource(algorithm, source, layers, _speculative_tokens(section))


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
    """Find out what a folder holds. Readers are asked in order; the first one that recognises it decides.

    Raises:
        CheckpointError: no reader recognises it; the message says what the folder holds.
    """
    if is_speculators(source):
        return _speculators_format(source, [reader.algorithm for reader in readers if reader.speculators])
    for reader in readers:
        found = reader.recognise(source, checkpoint)
        if found is not None:
            return found
    raise CheckpointError(
        f"{source.name}: no known drafter (model_type {shown(source.values.get('model_type'))}, "
        f"architectures {shown(list(source.strings('architectures')))}, {len(checkpoint.tensors)} tensors, such as "
        f"{shown(checkpoint.names()[0])}); known are {', '.join(reader.algorithm for reader in readers)}"
    )


def _speculators_format(source: ConfigSource, known: Sequence[str]) -> DrafterFormat:
    found = speculators_source(source)
    if found.algorithm not in known:
        problem = f"is {shown(found.algorithm)}; supported are {', '.join(sorted(known))}"
        raise source.fail("speculators_model_type", problem)
    evidence = f"speculators_model_type is {found.algorithm}"
    return DrafterFormat(found.algorithm, "speculators", evidence, found.num_speculative_tokens)
