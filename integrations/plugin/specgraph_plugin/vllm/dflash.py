"""Makes a `DFlashHead` or `DSparkHead` from vLLM's loaded drafter: views of its weights."""

from __future__ import annotations

from typing import Any

from specgraph_models.decoder import AuxWeights
from specgraph_models.dflash import BlockParts, DFlashHead
from specgraph_models.dspark import DSparkHead, MarkovHead
from specgraph_models.from_modules import (
    config_from_module,
    layer_from_module,
    linear_of,
    plain,
    set_rotary,
    vocabulary_rows,
)
from specgraph_models.parallel import TensorParallel

from specgraph.errors import UnsupportedError
from specgraph.ops.linear import Weight
from specgraph_plugin.vllm.config import predicts_at_anchor

DFLASH_CLASS, DSPARK_CLASS = "DFlashQwen3ForCausalLM", "Qwen3DSparkForCausalLM"

ANY_BLOCK = 1 << 10
"""Rows of a block if the drafter's configuration has no number: vLLM then takes any K."""


def dflash_head(module: Any, ranks: TensorParallel) -> DFlashHead:
    """Return a head over a module of `DFLASH_CLASS`, which vLLM has split over `ranks`.

    Raises:
        UnsupportedError: the module has an option or a tensor that the head does not have.
    """
    head = DFlashHead(_block(module, ranks), in_one=False)
    set_rotary(head, module.model.layers[0].self_attn)
    return head


def dspark_head(module: Any, ranks: TensorParallel) -> DSparkHead:
    """Return a head over a module of `DSPARK_CLASS`, which vLLM has split over `ranks`.

    Every rank must have the whole Markov head. The confidence head is not read.

    Raises:
        UnsupportedError: the module has an option or a tensor that the head does not have.
    """
    config, table = module.config, module.model.markov_head
    is_split = table.markov_w2.weight.shape[0] < int(config.draft_vocab_size)
    for name, found, served in (
        ("dspark_draft_topk", getattr(config, "dspark_draft_topk", None), None),
        ("markov_head_type", getattr(config, "markov_head_type", "vanilla"), "vanilla"),
        ("logit_scale", getattr(config, "logit_scale", 1.0), 1.0),
        ("Markov head split over ranks", is_split, False),  # vLLM 0.26 splits it
    ):
        if found != served:
            raise UnsupportedError(f"{name} {found} in the DSpark drafter; served is {served}")
    block = _block(module, ranks)._replace(sample_from_anchor=predicts_at_anchor(config))
    embed = plain(table.markov_w1.weight)
    markov = MarkovHead(embed, Weight(vocabulary_rows(table.markov_w2, block.draft_vocab_size)))
    head = DSparkHead(block, markov, None, in_one=False)
    set_rotary(head, module.model.layers[0].self_attn)
    return head


def _block(module: Any, ranks: TensorParallel) -> BlockParts:
    """Return the part that both heads have: a block of mask tokens, in layers that are not causal."""
    config, inner = module.config, module.model
    if not inner.use_aux_hidden_state:
        raise UnsupportedError("use_aux_hidden_state is false; the head takes hidden states of the target's layers")
    if inner.has_separate_mask_embedding:
        raise UnsupportedError("an embedding of the mask token of its own (mask_embedding.pt)")
    for layer in inner.layers:
        attention = layer.self_attn
        for name, found, served in (
            ("causal layers", attention.causal, False),
            ("attention_sink_bias", attention.attention_sink_bias is not None, False),
            ("attention_value_scale", getattr(attention, "v_scale", None), None),
        ):
            if found != served:
                raise UnsupportedError(f"{name} in the {type(module).__name__} drafter")
    draft_vocab, offsets = int(config.draft_vocab_size), module.draft_id_to_target_id
    sizes, target_size = config_from_module(module, ranks), getattr(config, "target_hidden_size", None)
    fc = linear_of(inner.fc)
    weights = AuxWeights(
        embed_tokens=vocabulary_rows(inner.embed_tokens, sizes.vocab_size, ranks),
        fc=fc,
        hidden_norm=plain(inner.hidden_norm.weight),
        norm=plain(inner.norm.weight),
        lm_head=vocabulary_rows(module.lm_head, draft_vocab, ranks),
        draft_to_target=None if offsets is None else plain(offsets),
    )
    mask = config.dspark_noise_token_id if inner.mask_token_id is None else inner.mask_token_id
    return BlockParts(
        sizes,
        weights,
        [layer_from_module(layer, ranks) for layer in inner.layers],
        range(fc.matrix.shape[1] // (target_size or sizes.hidden_size)),  # vLLM chooses the layers
        block_size=int(getattr(config, "block_size", None) or ANY_BLOCK),
        mask_token_id=int(mask),
    )
