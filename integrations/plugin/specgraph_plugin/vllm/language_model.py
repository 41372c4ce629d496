"""Makes a `DraftModelHead` from vLLM's loaded language model (method `draft_model`): views of its weights."""

from __future__ import annotations

from typing import Any

from specgraph_models.draft_model import DraftModelHead
from specgraph_models.from_modules import config_from_module, layer_from_module, plain, set_rotary, vocabulary_rows
from specgraph_models.llama import LlamaTarget
from specgraph_models.parallel import TensorParallel

LANGUAGE_MODEL_CLASSES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Classes of vLLM's models. They differ only in biases and in norms of query and key."""


def language_model_head(module: Any, target_hidden_size: int, ranks: TensorParallel) -> DraftModelHead:
    """Return a head over a model of one of `LANGUAGE_MODEL_CLASSES`, which must have the target's vocabulary.

    Each key lies at its own token's position, because vLLM's code for prompts writes it there.

    Args:
        module: the model that vLLM loaded, with weights on the device.
        target_hidden_size: columns of the target's hidden states. The head does not read these states.
        ranks: the ranks that vLLM has split the model over.

    Raises:
        UnsupportedError: the module has an option or a tensor that the head does not have.
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
