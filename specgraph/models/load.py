"""From a checkpoint folder to a model: which architecture or format it is, and whether a drafter fits its target."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from specgraph.errors import CheckpointError, ConfigError
from specgraph.models.checkpoint_folder import CheckpointFolder, open_checkpoint
from specgraph.models.config import ConfigSource, model_config, read_config, refuse_quantised
from specgraph.models.eagle import load_eagle
from specgraph.models.eagle3_checkpoint import eagle3_config, load_eagle3
from specgraph.models.llama import LlamaTarget, load_llama
from specgraph.models.protocol import DraftHead
from specgraph.models.speculators_format import is_speculators, speculators_source

_HOST = torch.device("cpu")


ALGORITHMS = ("eagle", "eagle3")
"""Drafters that `load_drafter` reads."""


@dataclass(frozen=True, slots=True)
class DrafterFormat:
    """What a drafter's folder holds."""

    algorithm: str
    """One of ALGORITHMS."""
    layout: str
    """Whose names the folder uses: authors (of the algorithm), speculators."""
    evidence: str
    """What told so: a key of config.json, or tensors."""
    num_speculative_tokens: int | None = None
    """How many tokens the folder suggests to draft."""

    def __str__(self) -> str:
        return f"{self.algorithm}, {self.layout} layout ({self.evidence})"


def load_target(
    folder: Path | str,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    max_model_len: int | None = None,
) -> LlamaTarget:
    """Read a target from a Hugging Face folder.

    Args:
        folder: holds config.json and safetensors, single or sharded.
        device: where the weights go.
        dtype: of weights and activations; the checkpoint's own when None.
        max_model_len: positions to prepare for; the checkpoint's maximum when None.

    Raises:
        CheckpointError: unknown architecture, quantised weights, or a missing, truncated or misshapen part.
        ConfigError: max_model_len is below 1 or above what the checkpoint allows.
    """
    folder = Path(folder)
    source = read_config(folder)
    refuse_quantised(source)
    config = model_config(source)
    if max_model_len is not None:
        if not 1 <= max_model_len <= config.max_position_embeddings:
            raise ConfigError(
                f"max_model_len {max_model_len} is not in 1 to {config.max_position_embeddings}, "
                f"the max_position_embeddings of {source.name}"
            )
        config = config.with_max_position(max_model_len)
    return load_llama(open_checkpoint(folder, torch.device(device), dtype or config.dtype), config)


def drafter_format(folder: Path | str) -> DrafterFormat:
    """Find out which drafter a folder holds, from its config.json and tensor names.

    Raises:
        CheckpointError: not a folder with weights, or nothing that is known here.
    """
    folder = Path(folder)
    source = read_config(folder)
    return _detect(source, open_checkpoint(folder, _HOST, torch.float32))


def load_drafter(folder: Path | str, target: LlamaTarget, dtype: torch.dtype | None = None) -> DraftHead:
    """Read a drafter for `target`, onto the target's device.

    Args:
        folder: the drafter's folder; its format is found out.
        target: the model it drafts for; embedding and head are shared with it unless the folder has its own.
        dtype: of weights and activations; the target's when None.

    Raises:
        CheckpointError: unknown format, a missing or misshapen part, or a drafter made for another target.
    """
    folder = Path(folder)
    source = read_config(folder)
    refuse_quantised(source)
    checkpoint = open_checkpoint(folder, target.embed_tokens.device, dtype or target.dtype)
    found = _detect(source, checkpoint)
    speculators = speculators_source(source) if found.layout == "speculators" else None
    layers = source if speculators is None else speculators.layers
    refuse_quantised(layers)
    if found.algorithm == "eagle":
        return load_eagle(checkpoint, source, layers, target)
    # A speculators folder that leaves the key out means true, as the engines that serve them read it.
    config = eagle3_config(source, layers, target, norm_before_residual=speculators is not None)
    return load_eagle3(checkpoint, config, target, source)


def _detect(source: ConfigSource, checkpoint: CheckpointFolder) -> DrafterFormat:
    if is_speculators(source):
        speculators = speculators_source(source)
        if speculators.algorithm not in ALGORITHMS:
            raise source.fail(
                "speculators_model_type", f"is {speculators.algorithm!r}; supported are {', '.join(ALGORITHMS)}"
            )
        evidence = f"speculators_model_type is {speculators.algorithm}"
        return DrafterFormat(speculators.algorithm, "speculators", evidence, speculators.num_speculative_tokens)
    architectures = [str(name) for name in source.values.get("architectures") or []]
    for name in architectures:
        if "eagle3" in name.lower():
            return DrafterFormat("eagle3", "authors", f"architectures names {name}")
    for name in ("midlayer.mlp.down_proj.weight", "model.midlayer.mlp.down_proj.weight"):
        if name in checkpoint:
            return DrafterFormat("eagle3", "authors", f"tensor {name}")
    if "fc.weight" in checkpoint and "layers.0.mlp.down_proj.weight" in checkpoint and "norm.weight" not in checkpoint:
        return DrafterFormat("eagle", "authors", "tensors fc and layers.0, no final norm")
    raise CheckpointError(
        f"{source.name}: no known drafter (architectures {architectures}, {len(checkpoint.files)} tensors, "
        f"such as {', '.join(checkpoint.names()[:3])}); known are {', '.join(ALGORITHMS)}"
    )
