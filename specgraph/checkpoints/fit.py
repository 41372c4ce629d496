"""Whether a drafter fits its target. Every mismatch is one error that names both sides' numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from specgraph.checkpoints.config_source import ConfigSource
from specgraph.checkpoints.files import shown
from specgraph.checkpoints.folder import CheckpointFolder
from specgraph.checkpoints.model_config import model_config
from specgraph.errors import CheckpointError
from specgraph.models.config import ModelConfig
from specgraph.parallel import TensorParallel


class DraftedTarget(Protocol):
    """What a drafter must match, and the tensors that it may share: a `LlamaTarget`, or a `TargetShape`."""

    @property
    def architecture(self) -> str: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def embed_tokens(self) -> Tensor: ...
    @property
    def lm_head(self) -> Tensor: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def tensor_parallel(self) -> TensorParallel:
        """How its matrices are split; the drafter's are split alike."""
        ...


def drafter_config(
    layers: ConfigSource, target: DraftedTarget, default_architecture: str, absent_keys: bool = False
) -> ModelConfig:
    """Sizes of a drafter's decoder, with as many positions as the target has.

    A drafter's own `max_position_embeddings` is the length of its training texts, and no limit. `absent_keys`: see
    `model_config`; for drafters whose authors read the configuration with the architecture's own class.

    Raises:
        CheckpointError: a malformed or unsupported key.
    """
    config = model_config(layers, default_architecture, absent_keys)
    return config.with_max_position(target.max_model_len).split(target.tensor_parallel)


def check_same(what: str, drafter: int, target: int, source: str) -> None:
    """Raise CheckpointError unless both numbers agree."""
    if drafter != target:
        raise CheckpointError(
            f"{source}: this drafter was made for a target with {what} {drafter}, the target has {target}; "
            "give the drafter that was trained for this target"
        )


def check_aux_layers(aux_layers: Sequence[int], target: DraftedTarget, source: str) -> None:
    """Raise CheckpointError unless there are aux layers and each is a state of the target: 0 to num_layers."""
    if not aux_layers or not all(0 <= k <= target.num_layers for k in aux_layers):
        raise CheckpointError(
            f"{source}: the drafter takes the target's hidden states at layers {shown(list(aux_layers))}, "
            f"the target has layers 0 to {target.num_layers}"
        )


def shared_or_own(
    folder: CheckpointFolder, name: str, target: DraftedTarget, target_tensor: Tensor, rows: int, columns: int
) -> Tensor:
    """The drafter's own embedding or head [rows, columns], or the target's tensor; this rank's rows where it is split.

    The target's is used when the folder has none, and when the folder's is equal to it, to save memory.

    Raises:
        CheckpointError: the folder has none and the target's has another shape.
    """
    own = folder.optional_weight(name, (rows, columns), target.tensor_parallel.vocabulary(rows))
    if own is None:
        if (target.vocab_size, target_tensor.shape[1]) != (rows, columns):
            raise CheckpointError(
                f"{folder.folder} has no {name!r}, and the target's cannot replace it: "
                f"it has shape {[target.vocab_size, target_tensor.shape[1]]}, the drafter needs {[rows, columns]}"
            )
        return target_tensor
    same = own.shape == target_tensor.shape and own.dtype == target_tensor.dtype and torch.equal(own, target_tensor)
    return target_tensor if same else own


def draft_to_target(folder: CheckpointFolder, draft_vocab_size: int, vocab_size: int) -> Tensor | None:
    """`d2t` as int64 offsets [draft_vocab_size]: target id = draft id + d2t[draft id]; None when all are 0.

    Raises:
        CheckpointError: absent though the vocabularies differ, not integers, an id outside the target's vocabulary, or
            two draft tokens that are the same target token.
    """
    if "d2t" not in folder:
        if draft_vocab_size != vocab_size:
            raise CheckpointError(
                f"{folder.folder} drafts over {draft_vocab_size} tokens, the target has {vocab_size}, "
                "and no 'd2t' tensor says which is which"
            )
        return None
    offsets = folder.integers("d2t", (draft_vocab_size,))
    draft_ids = torch.arange(draft_vocab_size)
    # Compared before the addition, which could wrap around.
    inside = bool(((offsets >= -draft_ids) & (offsets < vocab_size - draft_ids)).all())
    if not inside or (draft_ids + offsets).unique().numel() != draft_vocab_size:
        raise CheckpointError(
            f"{folder.folder}: 'd2t' should hold offsets (target id minus draft id) that lead each draft token to "
            f"another of the target's {vocab_size} ids; they range from {int(offsets.min())} to {int(offsets.max())}"
        )
    return None if not bool(offsets.any()) and draft_vocab_size == vocab_size else offsets.to(folder.device)
