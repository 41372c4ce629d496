"""The common part of the readers of drafters: which drafter a folder holds, and whether it fits its target.

A reader recognises the folders of one kind of drafter and loads them; `specgraph.checkpoints.load` has the list. The
`speculators` package has a folder format of its own, one config.json that embeds the decoder's and the verifier's:

speculators_model_type      eagle, eagle3, mtp, dflash, ...
transformer_layer_config    the draft decoder's own configuration, with its `model_type`
speculators_config          algorithm, proposal methods (how many tokens to draft), the verifier's name
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from specgraph.checkpoints.config_source import ConfigSource
from specgraph.checkpoints.files import shown
from specgraph.checkpoints.folder import CheckpointFolder
from specgraph.checkpoints.model_config import model_config
from specgraph.errors import CheckpointError
from specgraph.models.config import ModelConfig
from specgraph.parallel import TensorParallel

IGNORED = {
    r"(.*\.)?t2d": "the inverse of d2t",
    r"verifier_(lm_head|norm)\.weight": "the target's, used in training",
}
"""Pattern of tensor names -> why no drafter needs it."""


class DraftedTarget(Protocol):
    """The sizes that a drafter must match, and the tensors that it may share: a `LlamaTarget`, or a `TargetShape`."""

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
        """Return how its matrices are split; the drafter's are split alike."""
        ...


@dataclass(frozen=True, slots=True)
class DrafterFormat:
    """The kind of drafter that a folder holds."""

    algorithm: str
    """eagle, eagle3, mtp, dflash, draft_model, ..."""
    layout: str
    """Whose names the folder uses: the algorithm's authors', speculators', transformers', or an MTP family's."""
    evidence: str
    """The key of config.json or the tensors that it was recognised by."""
    num_speculative_tokens: int | None = None
    """Draft tokens per propose that the folder suggests; None when it suggests none."""

    def __str__(self) -> str:
        return f"{self.algorithm}, {self.layout} layout ({self.evidence})"


@dataclass(frozen=True, slots=True)
class DrafterFolder:
    """A drafter's folder, opened for a target, with the checks that all kinds of drafters share."""

    checkpoint: CheckpointFolder
    target: DraftedTarget
    head: ConfigSource
    """The top level of config.json: how the head uses its target."""
    layers: ConfigSource
    """The draft decoder's sizes: the top level too, or a section of it."""
    format: DrafterFormat
    num_modules: int | None = None
    """Number of MTP modules that the caller asked for; None for all."""

    def decoder_config(self, default_architecture: str, absent_keys: bool = False) -> ModelConfig:
        """Return the decoder's sizes, with as many positions as the target has, and the target's vocabulary.

        A drafter's own `max_position_embeddings` is the length of its training texts, and no limit. `absent_keys`: see
        `model_config`; for drafters whose authors read the configuration with the architecture's own class.
        """
        config = model_config(self.layers, default_architecture, absent_keys)
        self.check_same("vocabulary", config.vocab_size, self.target.vocab_size)
        return config.with_max_position(self.target.max_model_len).split(self.target.tensor_parallel)

    def check_same(self, what: str, drafter: int, target: int) -> None:
        """Raise CheckpointError unless both numbers agree."""
        if drafter != target:
            raise CheckpointError(
                f"{self.layers.name}: this drafter was made for a target with {what} {drafter}, the target has "
                f"{target}; give the drafter that was trained for this target"
            )

    def check_aux_layers(self, aux_layers: Sequence[int]) -> None:
        """Raise CheckpointError unless there are aux layers and each is a state of the target: 0 to num_layers."""
        if not aux_layers or not all(0 <= k <= self.target.num_layers for k in aux_layers):
            raise CheckpointError(
                f"{self.head.name}: the drafter takes the target's hidden states at layers {shown(list(aux_layers))}, "
                f"the target has layers 0 to {self.target.num_layers}"
            )

    def mask_token(self, source: ConfigSource, key: str) -> int:
        """Return the token of masked rows, which has a row in the target's embedding."""
        token_id = source.integer(key)
        if token_id >= self.target.vocab_size:
            raise source.fail(key, f"is {token_id}, the target's vocabulary has {self.target.vocab_size}")
        return token_id

    def embedding(self, name: str, hidden_size: int) -> Tensor:
        """Return the drafter's own embedding, or the target's: see `lm_head`."""
        return self._shared_or_own(name, self.target.embed_tokens, (self.target.vocab_size, hidden_size))

    def lm_head(self, name: str, draft_vocab_size: int, hidden_size: int) -> Tensor:
        """Return the drafter's own head, or the target's; this rank's rows where it is split.

        The target's is used when the folder has none, and when the folder's is equal to it, to save memory.
        """
        return self._shared_or_own(name, self.target.lm_head, (draft_vocab_size, hidden_size))

    def _shared_or_own(self, name: str, shared: Tensor, shape: tuple[int, int]) -> Tensor:
        if name not in self.checkpoint:
            if (self.target.vocab_size, shared.shape[1]) != shape:
                raise CheckpointError(
                    f"{self.checkpoint.folder} has no {name!r}, and the target's cannot replace it: "
                    f"it has shape {[self.target.vocab_size, shared.shape[1]]}, the drafter needs {list(shape)}"
                )
            return shared
        own = self.checkpoint.weight(name, shape, share=self.target.tensor_parallel.vocabulary(shape[0]))
        same = own.shape == shared.shape and own.dtype == shared.dtype and torch.equal(own, shared)
        return shared if same else own

    def draft_to_target(self, draft_vocab_size: int) -> Tensor | None:
        """Return `d2t` as int64 offsets, target id = draft id + d2t[draft id]; None when all are 0."""
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
        # Compared before the addition, which could wrap around.
        inside = bool(((offsets >= -draft_ids) & (offsets < vocab_size - draft_ids)).all())
        if not inside or (draft_ids + offsets).unique().numel() != draft_vocab_size:
            raise CheckpointError(
                f"{folder.folder}: 'd2t' should hold offsets (target id minus draft id) that lead each draft token to "
                f"another of the target's {vocab_size} ids; they range from {int(offsets.min())} to "
                f"{int(offsets.max())}"
            )
        return None if not bool(offsets.any()) and draft_vocab_size == vocab_size else offsets.to(folder.device)


Loaded = TypeVar("Loaded", covariant=True)


@dataclass(frozen=True, slots=True)
class DrafterReader(Generic[Loaded]):
    """The two functions that read one kind of drafter."""

    algorithm: str
    recognise: Callable[[ConfigSource, CheckpointFolder], DrafterFormat | None]
    """Recognises a folder, or returns None. Not asked about the `speculators` format, which names its algorithm."""
    load: Callable[[DrafterFolder], Loaded]
    """Loads it; raises CheckpointError for a missing or misshapen tensor, or a head that does not fit the target."""
    speculators: bool = True
    """This algorithm also comes in the `speculators` format, under the same name."""


def detect_format(
    source: ConfigSource, checkpoint: CheckpointFolder, readers: Sequence[DrafterReader[object]]
) -> DrafterFormat:
    """Return what a folder holds. Readers are asked in order; the first one that recognises it decides."""
    if source.has("speculators_model_type") or source.has("speculators_config"):
        return _speculators_format(source, sorted(reader.algorithm for reader in readers if reader.speculators))
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
    section = source.section("speculators_config")
    algorithm = source.string("speculators_model_type", "") or section.string("algorithm")
    if not source.has("transformer_layer_config"):
        raise source.fail("transformer_layer_config", "is missing; it should hold the draft decoder's configuration")
    section.taken.update(section.values)  # the rest is advice: the verifier's name, how many tokens to draft
    tokens = _speculative_tokens(section)
    if algorithm not in known:
        raise source.fail("speculators_model_type", f"is {shown(algorithm)}; supported are {', '.join(known)}")
    return DrafterFormat(algorithm, "speculators", f"speculators_model_type is {algorithm}", tokens)


def _speculative_tokens(section: ConfigSource) -> int | None:
    """Return the number of draft tokens that the default proposal method asks for."""
    methods = section.values.get("proposal_methods")
    if not isinstance(methods, list):
        return None
    default = section.string("default_proposal_method", "")
    mappings = [ConfigSource(m, f"{section.name}[proposal_methods]") for m in methods if isinstance(m, dict)]
    chosen = next((m for m in mappings if m.values.get("proposal_type") == default), mappings[0] if mappings else None)
    return chosen.integer("speculative_tokens") if chosen is not None and chosen.has("speculative_tokens") else None
