"""Which drafter a checkpoint folder holds, told from its config.json and tensor names."""

from __future__ import annotations

from dataclasses import dataclass

from specgraph.errors import CheckpointError
from specgraph.models.checkpoint_folder import CheckpointFolder
from specgraph.models.config import ARCHITECTURES
from specgraph.models.config_source import ConfigSource
from specgraph.models.mtp_checkpoint import mtp_family
from specgraph.models.speculators_format import is_speculators, speculators_source

ALGORITHMS = ("eagle", "eagle3", "mtp", "dflash", "draft_model")
"""Drafters that `load_drafter` reads."""


@dataclass(frozen=True, slots=True)
class DrafterFormat:
    """What a drafter's folder holds."""

    algorithm: str
    """One of ALGORITHMS."""
    layout: str
    """Whose names the folder uses: authors (of the algorithm), speculators, transformers, or an MTP family's."""
    evidence: str
    """What told so: a key of config.json, or tensors."""
    num_speculative_tokens: int | None = None
    """How many tokens the folder suggests to draft."""

    def __str__(self) -> str:
        return f"{self.algorithm}, {self.layout} layout ({self.evidence})"


def detect_format(source: ConfigSource, checkpoint: CheckpointFolder) -> DrafterFormat:
    """Find out what a folder holds.

    Raises:
        CheckpointError: nothing that is known here; the message says what was looked at.
    """
    if is_speculators(source):
        return _speculators_format(source)
    architectures = [str(name) for name in source.values.get("architectures") or []]
    if source.has("dflash_config"):
        return DrafterFormat("dflash", "authors", "config.json has dflash_config", _block(source))
    for name in architectures:
        if "eagle3" in name.lower():
            return DrafterFormat("eagle3", "authors", f"architectures names {name}")
    for name in ("midlayer.mlp.down_proj.weight", "model.midlayer.mlp.down_proj.weight"):
        if name in checkpoint:
            return DrafterFormat("eagle3", "authors", f"tensor {name}")
    if "fc.weight" in checkpoint and "layers.0.mlp.down_proj.weight" in checkpoint and "norm.weight" not in checkpoint:
        return DrafterFormat("eagle", "authors", "tensors fc and layers.0, no final norm")
    family = mtp_family(checkpoint)
    if family is not None:
        return DrafterFormat("mtp", family.family, f"tensors named as {family.projection}")
    model_type = source.values.get("model_type")
    if model_type in ARCHITECTURES and "model.embed_tokens.weight" in checkpoint:
        return DrafterFormat("draft_model", "transformers", f"a whole {model_type} model")
    raise CheckpointError(
        f"{source.name}: no known drafter (model_type {model_type!r}, architectures {architectures}, "
        f"{len(checkpoint.files)} tensors, such as {', '.join(checkpoint.names()[:3])}); "
        f"known are {', '.join(ALGORITHMS)}"
    )


def _speculators_format(source: ConfigSource) -> DrafterFormat:
    found = speculators_source(source)
    if found.algorithm not in ALGORITHMS:
        known = ", ".join(name for name in ALGORITHMS if name != "draft_model")
        raise source.fail("speculators_model_type", f"is {found.algorithm!r}; supported are {known}")
    evidence = f"speculators_model_type is {found.algorithm}"
    return DrafterFormat(found.algorithm, "speculators", evidence, found.num_speculative_tokens)


def _block(source: ConfigSource) -> int | None:
    holder = source if source.has("block_size") else source.section("dflash_config")
    return holder.integer("block_size", minimum=2) - 1 if holder.has("block_size") else None
