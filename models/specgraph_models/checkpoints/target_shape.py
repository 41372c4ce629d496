"""The sizes and tensors that a drafter needs from a target that is not built here, such as a host engine's own.

EAGLE-3 heads for mixtures of experts and other large targets are themselves Llama-shaped. To draft for such a target,
`load_drafter` needs its sizes, its embedding and its `lm_head`. `target_shape` finds them in a checkpoint folder, a
state dict or a module.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specgraph.errors import ConfigError
from specgraph.validation import MOST_POSITIONS, Count, Tokens, checked, checked_fields
from specgraph_models.checkpoints.config_source import read_config
from specgraph_models.checkpoints.files import shown
from specgraph_models.checkpoints.folder import CheckpointFolder
from specgraph_models.checkpoints.model_config import config_dtype
from specgraph_models.checkpoints.stored import stored_tensors
from specgraph_models.checkpoints.text_model import text_source
from specgraph_models.errors import CheckpointError
from specgraph_models.names import DType, device_named, dtype_named
from specgraph_models.parallel import WHOLE, TensorParallel

_EMBEDDING = re.compile(
    r"(model\.|language_model\.|transformer\.|text_model\.)*(embed_tokens|wte|word_embeddings)\.weight"
)
_LM_HEAD = re.compile(r"(model\.|language_model\.)*lm_head\.weight")
_LAYER = re.compile(r"(?:model\.|language_model\.|transformer\.)*(?:layers|h)\.(\d+)\.")


@checked_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class TargetShape:
    """The sizes of a target, and the tensors that a drafter may share with it."""

    num_layers: Count
    max_model_len: Tokens
    """The positions that target and drafter run with."""
    embed_tokens: Tensor
    """[vocab_size, hidden_size]"""
    lm_head: Tensor
    """[vocab_size, hidden_size]. It is `embed_tokens` itself if the two are tied."""
    architecture: str = "llama"
    """`model_type` of the target's configuration."""
    tensor_parallel: TensorParallel = WHOLE
    """A drafter for such a target is whole on every rank."""

    def __post_init__(self) -> None:
        if self.embed_tokens.dim() != 2 or self.embed_tokens.shape != self.lm_head.shape:
            raise CheckpointError(
                f"the target's embedding has shape {list(self.embed_tokens.shape)} and its lm_head "
                f"{list(self.lm_head.shape)}; both should be [vocab_size, hidden_size]"
            )

    @property
    def hidden_size(self) -> int:
        """The columns of the residual stream."""
        return self.embed_tokens.shape[1]

    @property
    def vocab_size(self) -> int:
        """The rows of the embedding."""
        return self.embed_tokens.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the embedding, which is also the drafter's default."""
        return self.embed_tokens.dtype


@checked
def target_shape(
    target: Path | str | Mapping[str, Tensor] | torch.nn.Module,
    *,
    device: torch.device | str = "cpu",
    dtype: DType = None,
    max_model_len: Tokens | None = None,
) -> TargetShape:
    """Return the sizes and tensors that a drafter needs from a target of any architecture.

    Args:
        target: a Hugging Face folder (only config.json and two tensors are read); a state dict; or a transformers model
            (any module with `config`, `get_input_embeddings` and `get_output_embeddings`). The tensors of a state dict
            or a module are shared, not copied.
        device, dtype: of tensors read from a folder; by default the CPU and the folder's dtype. Ignored for a state
            dict or a module.
        max_model_len: positions to run with; by default the target's maximum. Required with a state dict.

    Raises:
        CheckpointError: there is no embedding, or sizes are missing or contradict each other.
        ConfigError: max_model_len is missing or out of range.
    """
    if isinstance(target, torch.nn.Module):
        return _of_module(target, max_model_len)
    if isinstance(target, Mapping):
        return _of_tensors(target, max_model_len)
    path = Path(target)
    source = read_config(path)
    config = text_source(source)
    folder = CheckpointFolder(
        path, stored_tensors(path), device_named(device), dtype_named(dtype) or config_dtype(config)
    )
    sizes = (config.integer("vocab_size"), config.integer("hidden_size"))
    embedding, head = _shared_names(folder.names(), config.boolean("tie_word_embeddings", False), str(target))
    embed_tokens = folder.weight(embedding, sizes)
    return TargetShape(
        num_layers=config.integer("num_hidden_layers"),
        max_model_len=max_model_len or min(config.integer("max_position_embeddings"), MOST_POSITIONS),
        embed_tokens=embed_tokens,
        lm_head=embed_tokens if head is None else folder.weight(head, sizes),
        architecture=config.string("model_type", "llama"),
    )


def _of_tensors(tensors: Mapping[str, Tensor], max_model_len: int | None) -> TargetShape:
    """Return the shape from tensors, by the names that checkpoints use."""
    if max_model_len is None:
        raise ConfigError("a state dict does not say how many positions its model has; give max_model_len")
    embedding, head = _shared_names(list(tensors), False, "the state dict")
    return TargetShape(
        num_layers=1 + max((int(found[1]) for name in tensors if (found := _LAYER.match(name))), default=-1),
        max_model_len=max_model_len,
        embed_tokens=tensors[embedding].detach(),
        lm_head=tensors[head or embedding].detach(),
    )


def _of_module(module: torch.nn.Module, max_model_len: int | None) -> TargetShape:
    """Return the shape of a module, by the methods of transformers' models."""
    config: Any = getattr(module, "config", None)
    tables = [getattr(module, name, None) for name in ("get_input_embeddings", "get_output_embeddings")]
    if config is None or not all(callable(table) for table in tables):
        raise CheckpointError(
            f"{type(module).__name__} lacks config, get_input_embeddings() or get_output_embeddings() of transformers' "
            "models; give target_shape(module.state_dict(), max_model_len=...)"
        )
    text = config.get_text_config() if callable(getattr(config, "get_text_config", None)) else config

    def size(name: str) -> int:
        value = getattr(text, name, None)
        if type(value) is not int or value < 1:
            raise CheckpointError(
                f"{type(module).__name__}: 'config.{name}' is {shown(value)}, it should be an integer of at least 1; "
                "give a TargetShape"
            )
        return value

    embedding, head = (table() for table in tables if table is not None)
    if head is None:
        raise CheckpointError(f"{type(module).__name__} has no lm_head; give the model with its language-model head")
    weights: list[Any] = [getattr(table, "weight", None) for table in (embedding, head)]
    if not all(isinstance(weight, Tensor) for weight in weights):
        raise CheckpointError(f"{type(module).__name__}: its embedding or lm_head has no weight; give a TargetShape")
    return TargetShape(
        num_layers=size("num_hidden_layers"),
        max_model_len=max_model_len or min(size("max_position_embeddings"), MOST_POSITIONS),
        embed_tokens=weights[0].detach(),
        lm_head=weights[1].detach(),
        architecture=str(getattr(text, "model_type", "llama")),
    )


def _shared_names(names: Sequence[str], tied: bool, where: str) -> tuple[str, str | None]:
    """Return the names of the embedding and of lm_head. None for lm_head if it is tied to the embedding."""
    embeddings, heads = ([n for n in names if pattern.fullmatch(n)] for pattern in (_EMBEDDING, _LM_HEAD))
    for what, found in (("embed_tokens.weight", embeddings), ("lm_head.weight", heads)):
        if len(found) > 1 or (not found and (found is embeddings or not tied)):
            tied = not found and found is heads
            hint = "; where lm_head is the embedding, give its tensor under 'lm_head.weight' too" if tied else ""
            raise CheckpointError(
                f"{where} has {len(found)} tensors named like {what}, and a drafter takes its target's: give the whole "
                f"language model (it has {len(names)} tensors, such as {shown(names[0]) if names else 'none'}){hint}"
            )
    return embeddings[0], heads[0] if heads else None
