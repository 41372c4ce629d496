"""The folder format of the `speculators` package: one config.json that embeds the decoder's and the verifier's.

speculators_model_type      eagle, eagle3, mtp, dflash, ...
transformer_layer_config    the draft decoder's own configuration, with its `model_type`
speculators_config          algorithm, proposal methods (how many tokens to draft), the verifier's name
"""

from __future__ import annotations

from dataclasses import dataclass

from specgraph.models.config_source import ConfigSource


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
