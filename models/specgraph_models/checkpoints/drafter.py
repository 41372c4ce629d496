"""A drafter's folder, opened for its target: the tensors that both share, and checks that the two fit."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import torch
from torch import Tensor

from specgraph.errors import ConfigError
from specgraph_models.checkpoints.architectures import ARCHITECTURES, Architecture
from specgraph_models.checkpoints.config_source import ConfigSource
from specgraph_models.checkpoints.files import shown
from specgraph_models.checkpoints.folder import CheckpointFolder
from specgraph_models.checkpoints.model_config import model_config
from specgraph_models.checkpoints.target_shape import TargetShape
from specgraph_models.config import ModelConfig
from specgraph_models.errors import CheckpointError
from specgraph_models.llama import LlamaTarget

_LOG = logging.getLogger("specgraph")

DraftedTarget = LlamaTarget | TargetShape
"""The target's sizes, which a drafter must match, and the tensors that it may share. Ranks split both alike."""

IGNORED = {r"(.*\.)?t2d": "the inverse of d2t", r"verifier_(lm_head|norm)\.weight": "the target's, used in training"}
"""Pattern of tensor names -> the reason why no drafter needs them."""

EAGLE_ARCHITECTURES = {name: ARCHITECTURES[name] for name in ("llama", "qwen2", "qwen3")}
"""The architectures of EAGLE heads' layers. A head that names another one has Llama's layers (Mistral: no windows)."""

_PARTS = {
    "qk_norm": "self_attn.q_norm.weight",
    "qkv_bias": "self_attn.q_proj.bias",
    "output_bias": "self_attn.o_proj.bias",
    "mlp_bias": "mlp.gate_proj.bias",
}
"""Field of `ModelConfig` -> the tensor in an EAGLE head's layer that shows it."""

_OF_TARGET = (
    "num_local_experts", "num_experts", "n_routed_experts", "num_experts_per_tok", "mlp_only_layers",
    "kv_lora_rank", "q_lora_rank", "use_qk_norm", "qk_layernorm",
)  # fmt: skip
"""Keys of a configuration that was copied from a target. They name tensors that a Llama's layer does not have."""


@dataclass(frozen=True, slots=True)
class DrafterFolder:
    """A drafter's folder, opened for a target, with the checks that all formats share."""

    checkpoint: CheckpointFolder
    target: DraftedTarget
    head: ConfigSource
    """The top level of config.json, which has the keys on how the head uses its target."""
    layers: ConfigSource
    """The section of config.json with the draft decoder's sizes; it may be the top level too."""
    from_speculators: bool
    """True if the folder has the layout of speculators."""
    num_modules: int | None = None
    """The number of MTP modules to use. None for all."""

    def decoder_config(
        self, default_architecture: str, architectures: Mapping[str, Architecture] = ARCHITECTURES
    ) -> ModelConfig:
        """Return the decoder's sizes, with the target's positions and vocabulary.

        A drafter's own `max_position_embeddings` is the length of its training texts, not a limit.

        Args:
            default_architecture, architectures: see `model_config`.
        """
        config = model_config(self.layers, default_architecture, architectures)
        self.check_same("vocabulary", config.vocab_size, self.target.vocab_size)
        return config.with_max_position(self.target.max_model_len).split(self.target.tensor_parallel)

    def eagle_layers(
        self, first: str, prefix: str = "", default_architecture: str = "llama"
    ) -> tuple[ModelConfig, list[str]]:
        """Return the sizes of an EAGLE head's layers, and the prefixes of their tensors.

        In the authors' layout config.json was often copied from the target's, or has the defaults of a tool
        (yuhuili/EAGLE3-Vicuna1.3-13B has 40 layers in it). In that layout the tensors decide: on the number of layers,
        their biases, and the norms of their heads. One warning tells if config.json differs.

        Args:
            first: prefix of the first layer's tensors.
            prefix: prefix of the other layers' tensors, before `layers.1`.
            default_architecture: see `model_config`.
        """
        config, folder = self.decoder_config(default_architecture, EAGLE_ARCHITECTURES), self.checkpoint
        names = [first, *(f"{prefix}layers.{i}" for i in range(1, config.num_layers))]
        if self.from_speculators:
            return config, names
        self.layers.taken.update(_OF_TARGET)
        names = list(takewhile(lambda name: f"{name}.mlp.down_proj.weight" in folder, names)) or names
        found = {"num_layers": len(names), **{part: f"{first}.{name}" in folder for part, name in _PARTS.items()}}
        different = {name: found[name] for name in found if getattr(config, name) != found[name]}
        if different:
            said = {name: getattr(config, name) for name in different}
            _LOG.warning("%s: the head's layers have %s by config.json, and %s by their tensors, which count here",
                         self.layers.name, said, different)  # fmt: skip
        return replace(config, **different), names

    def check_same(self, what: str, drafter: int, target: int) -> None:
        """Raise CheckpointError unless both numbers are equal."""
        if drafter != target:
            raise CheckpointError(
                f"{self.layers.name}: this drafter was made for a target with {what} {drafter}, the target has "
                f"{target}; give the drafter that was trained for this target"
            )

    def check_aux_layers(self, aux_layers: Sequence[int]) -> None:
        """Raise CheckpointError if there are no aux layers, or if one is not a state of the target, 0 to num_layers."""
        if not aux_layers or not all(0 <= k <= self.target.num_layers for k in aux_layers):
            raise CheckpointError(
                f"{self.head.name}: the drafter takes the target's hidden states at layers {shown(list(aux_layers))}, "
                f"the target has layers 0 to {self.target.num_layers}"
            )

    def mask_token(self, source: ConfigSource, key: str) -> int:
        """Return the token id of masked rows, which must be in the target's embedding."""
        token_id = source.integer(key)
        if token_id >= self.target.vocab_size:
            raise source.fail(key, f"is {token_id}, the target's vocabulary has {self.target.vocab_size}")
        return token_id

    def embedding(self, name: str, hidden_size: int) -> Tensor:
        """Return the drafter's own embedding, or the target's as in `lm_head`."""
        return self._shared_or_own(name, self.target.embed_tokens, (self.target.vocab_size, hidden_size))

    def lm_head(self, name: str, draft_vocab_size: int, hidden_size: int) -> Tensor:
        """Return the drafter's own lm_head, or the target's. If it is split over ranks, return this rank's rows.

        It is the target's if the folder has none. It is also the target's if the folder's is equal: that saves memory.
        """
        return self._shared_or_own(name, self.target.lm_head, (draft_vocab_size, hidden_size))

    def _shared_or_own(self, name: str, shared: Tensor, shape: tuple[int, int]) -> Tensor:
        if name not in self.checkpoint:
            if (self.target.vocab_size, shared.shape[1]) != shape:
                raise CheckpointError(
                    f"{self.checkpoint.folder} has no {name!r}, and the target's cannot replace it: "
                    f"it has shape {[self.target.vocab_size, shared.shape[1]]}, the drafter needs {list(shape)}"
                )
            return self.shared(name, shared)
        own = self.checkpoint.weight(name, shape, share=self.target.tensor_parallel.vocabulary(shape[0]))
        same = own.shape == shared.shape and own.dtype == shared.dtype and torch.equal(own, shared)
        return shared if same else own

    def shared(self, name: str, tensor: Tensor) -> Tensor:
        """Return the target's tensor for the drafter's `name`. Raises ConfigError if its dtype is not the drafter's."""
        if tensor.dtype != self.checkpoint.dtype:
            raise ConfigError(
                f"a drafter of dtype {self.checkpoint.dtype} shares '{name.removesuffix('.weight')}' with its target, "
                f"where it is {tensor.dtype}: leave dtype out, or give the target's tensors in that dtype"
            )
        return tensor

    def draft_to_target(self, draft_vocab_size: int) -> Tensor | None:
        """Return `d2t` as int64 offsets: target id = draft id + d2t[draft id]. None if all are 0."""
        folder, vocab_size = self.checkpoint, self.target.vocab_size
        if "d2t" not in folder:
            if draft_vocab_size != vocab_size:
                raise CheckpointError(
                    f"{folder.folder} drafts over {draft_vocab_size} tokens, the target has {vocab_size}, "
                    "and no 'd2t' tensor says which is which"
                )
            return None
        offsets = folder.integers("d2t", (draft_vocab_size,))
        draft_ids = torch.arange(draft_vocab_size)
        # Checked before the addition, which could overflow.
        inside = bool(((offsets >= -draft_ids) & (offsets < vocab_size - draft_ids)).all())
        if not inside or (draft_ids + offsets).unique().numel() != draft_vocab_size:
            raise CheckpointError(
                f"{folder.folder}: 'd2t' should hold offsets (target id minus draft id) that lead each draft token to "
                f"another of the target's {vocab_size} ids; they range from {int(offsets.min())} to "
                f"{int(offsets.max())}"
            )
        return None if not bool(offsets.any()) and draft_vocab_size == vocab_size else offsets.to(folder.device)
