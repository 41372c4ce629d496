"""vLLM's loaded language model as a drafter (method `draft_model`): views of its weights."""

from __future__ import annotations

from typing import Any

from specgraph_models.draft_model import DraftModelHead
from specgraph_models.from_modules import config_from_module, layer_from_module, plain, set_rotary, vocabulary_rows
from specgraph_models.llama import LlamaTarget

from specgraph.parallel import TensorParallel

LANGUAGE_MODEL_CLASSES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""vLLM's models that differ in biases and norms of query and key only."""


def language_model_head(module: Any, target_hidden_size: int, ranks: TensorParallel) -> DraftModelHead:
    """The head over one of `LANGUAGE_MODEL_CLASSES`, which has the target's vocabulary.

    Keys lie at their own token's position, as vLLM's code for prompts writes them.

    Args:
        module: as vLLM loaded it, its weights on the device.
        target_hidden_size: columns of the target's hidden states, which the head ignores.
        ranks: over which vLLM has split the module.

    Raises:
        UnsupportedError: an option or a tensor of the module that the head does not have.
    """
    inner, config = module.model, config_from_module(module, ranks)
    model = LlamaTarget(
        config,
        vocabulary_rows(inner.embed_tokens, config.vocab_size, ranks),
        [layer_from_module(layer, ranks) for layer in inner.layers],
        plain(inner.norm.weight),
        vocabulary_rows(module.lm_head, config.vocab_size, ranks),
    )
    set_rotary(model, inner.layers[0].self_attn)
    return DraftModelHead(model, target_hidden_size)
