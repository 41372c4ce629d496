"""An independent small language model as a chain drafter: it needs nothing of the target but its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from specgraph.attention import Attend
from specgraph.errors import CheckpointError
from specgraph.models.checkpoint_folder import CheckpointFolder
from specgraph.models.config import ARCHITECTURES, model_config
from specgraph.models.config_source import ConfigSource
from specgraph.models.decoder_layer import taken
from specgraph.models.fit import check_same
from specgraph.models.formats import DrafterFolder, DrafterFormat, DrafterReader
from specgraph.models.llama import LlamaTarget, load_llama
from specgraph.models.protocol import DraftOutput


class DraftModelHead:
    """A small model with the target's vocabulary; the hidden state it is handed is not read.

    Implements `DraftHead` and `OffsetHead`: a row takes the token *after* its position, as with any drafter, and the
    model's keys and values stand at that token's own position.
    """

    position_offset: int = 1
    aux_layers: Sequence[int] = ()
    draft_to_target: Tensor | None = None

    def __init__(self, model: LlamaTarget, target_hidden_size: int) -> None:
        """target_hidden_size: columns of the hidden states that are handed over, and not read."""
        self.model = model
        self.attention_layers, self.aux_size = model.attention_layers, target_hidden_size
        self.hidden_size, self.draft_vocab_size, self.dtype = model.hidden_size, model.vocab_size, model.dtype

    def combine(self, aux_hidden: Tensor) -> Tensor:
        """Zeros [T, hidden_size]."""
        return aux_hidden.new_zeros(aux_hidden.shape[0], self.hidden_size)

    def forward(self, token_ids: Tensor, hidden: Tensor, attend: Attend, rows: Tensor | None = None) -> DraftOutput:
        """token_ids int64 [T], the token after each row's position."""
        out = self.model.forward(token_ids, attend).hidden
        if rows is not None:
            out = taken(out, rows)
        return DraftOutput(out, out)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden_size] -> [N, vocab_size]."""
        return self.model.logits(hidden)

    def weights(self) -> Mapping[str, Tensor]:
        """The model's."""
        return self.model.weights()


def recognise_draft_model(source: ConfigSource, checkpoint: CheckpointFolder) -> DrafterFormat | None:
    """A whole model of an architecture that is read here."""
    model_type = source.values.get("model_type")
    if model_type in ARCHITECTURES and "model.embed_tokens.weight" in checkpoint:
        return DrafterFormat("draft_model", "transformers", f"a whole {model_type} model")
    return None


def load_draft_model(opened: DrafterFolder, target: LlamaTarget) -> DraftModelHead:
    """Read a small model as a drafter, with as many positions as the target has.

    Raises:
        CheckpointError: another vocabulary than the target's, fewer positions, or a missing or misshapen tensor.
    """
    config, source = model_config(opened.layers), opened.layers.name
    check_same("vocabulary", config.vocab_size, target.vocab_size, source)
    if config.max_position_embeddings < target.max_model_len:
        raise CheckpointError(
            f"{source}: the draft model has {config.max_position_embeddings} positions, the target runs with "
            f"{target.max_model_len}; load the target with max_model_len={config.max_position_embeddings} or less"
        )
    config = config.with_max_position(target.max_model_len)
    config.require_full_attention(source)
    model = load_llama(opened.checkpoint, config)
    return DraftModelHead(model, target.hidden_size)


READER = DrafterReader("draft_model", recognise_draft_model, load_draft_model, speculators=False)
