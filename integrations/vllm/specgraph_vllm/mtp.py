"""vLLM's loaded MTP module as an `MtpHead`: views of its weights, but for one matrix."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from specgraph.models.from_modules import (
    config_from_module,
    layer_from_module,
    linear_weight,
    plain,
    set_rotary,
    vocabulary_rows,
)
from specgraph.models.mtp import MtpHead, MtpModule
from specgraph.ops.linear import Weight
from specgraph.parallel import TensorParallel

MTP_CLASS = "MiMoMTP"
"""MiMo's heads: one dense Qwen2 layer each."""


def mtp_module(module: Any) -> Any:
    """The module that drafts every token. vLLM's MTP speculator runs the first one only, however many there are."""
    return next(iter(module.model.mtp_layers.values()))


def mtp_head(module: Any, ranks: TensorParallel) -> MtpHead:
    """The head over vLLM's `MiMoMTP`, split over `ranks`.

    Its projection [hidden_size, 2 * hidden_size] is copied: vLLM's has the columns of the hidden state first, a head
    here those of the embedding.

    Raises:
        UnsupportedError: an option or a tensor of the module that the head does not have.
    """
    inner, first = module.model, mtp_module(module)
    layers = SimpleNamespace(layers=[first.mtp_block], embed_tokens=inner.embed_tokens)
    model = config_from_module(SimpleNamespace(config=module.config, model=layers), ranks)
    of_hidden, of_embedding = linear_weight(first.input_proj).chunk(2, dim=1)
    tensors = MtpModule(
        embed_norm=plain(first.token_layernorm.weight),
        hidden_norm=plain(first.hidden_layernorm.weight),
        projection=Weight(torch.cat((of_embedding, of_hidden), dim=1)),
        layer=layer_from_module(first.mtp_block, ranks),
        norm=plain(first.final_layernorm.weight),
    )
    embed_tokens, lm_head = (
        vocabulary_rows(of, model.vocab_size, ranks) for of in (inner.embed_tokens, module.lm_head)
    )
    head = MtpHead(model, [tensors], embed_tokens, lm_head)
    set_rotary(head, first.mtp_block.self_attn)
    return head
