"""A target and its drafter split over two ranks that have the same requests, and the check of their tokens.

Each rank holds some heads, inner columns and tokens of the vocabulary. They are cut here from the whole tensors as
`TensorParallel` describes; real checkpoints are cut while they are read. The tokens must be the ones
of the whole target in float64. Ranks that share keys (decode context parallel) have query heads of their own over the
one KV head of each layer.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from specgraph.attention import choose_attention
from specgraph.config import DraftConfig
from specgraph.device import Platform
from specgraph.draft import DraftTree
from specgraph.errors import RankError
from specgraph.ops.linear import Weight
from specgraph_models.draft_model import DraftModelHead
from specgraph_models.eagle import EagleHead
from specgraph_models.layers import DecoderLayer
from specgraph_models.llama import LlamaTarget
from specgraph_models.parallel import TensorParallel
from specgraph_run.decoder import DecoderOptions, SpeculativeDecoder
from specgraph_run.decoder.layout import join_layout
from torch import Tensor

from specgraph_conformance.shared_experts import CHUNK, LENGTH, Scenario, asked_of, shortfall
from specgraph_conformance.tiny_models import CONFIG, HIDDEN, make_head, make_target

PROMPTS = (5, 2 * CHUNK - 3)
KEYS = ("keys_heads", "keys_lse", "keys_lengths", "keys_updates", "keys_none", "keys_tree")
"""Scenarios of two ranks that share the keys of every request.

- `keys_heads`, `keys_lengths`: greedy tokens, and a drafter with the target's weights, which must agree with the
target.
- `keys_lse`, `keys_updates`: an EAGLE head. `keys_lengths` and `keys_updates` take lengths from the host if the
platform
  has task updates.
- `keys_none`: prompts of one and two tokens, so that a rank begins without a key.
- `keys_tree`: trees that the target drafts for itself. Long paths are accepted, so their keys move between ranks.
"""
OTHER_DRAFTER = ("split_logits", "split_sampled", "keys_lse", "keys_updates")
"""The scenarios with another drafter than the target itself."""
SPLIT = ("split", "split_logits", "split_sampled", *KEYS)
"""All scenarios.

- `split`: greedy tokens, chosen from each rank's most likely ones, and a drafter with the target's weights, which must
  agree with the target.
- `split_logits`: an EAGLE head, and log-probabilities, which need the gathered logits.
- `split_sampled`: an EAGLE head. Each rank samples drafts and tokens for itself, and all ranks must get the same.
"""


def run_split(platform: Platform, name: str, seed: int, timeout: float) -> str:
    """Run one scenario of SPLIT on all ranks together.

    Returns:
        The error, or an empty string.
    """
    keys = name in KEYS
    layout = join_layout(platform.device, tensor_parallel=2, decode_context_parallel=2 if keys else 1, timeout=timeout)
    try:
        ranks, device = layout.tensor_parallel, platform.device
        target = split_target(seed, device, ranks)
        is_same, sampled = name not in OTHER_DRAFTER, name == "split_sampled"
        head = (
            DraftModelHead(split_target(seed, device, ranks), HIDDEN) if is_same else split_eagle(seed, device, ranks)
        )
        config = DraftConfig(
            num_speculative_tokens=3, max_num_requests=2, max_model_len=LENGTH, capture_sizes=(2,),
            prefill_sizes=(CHUNK,), decode="merged", prefill="full", sampled=sampled,
            tree=DraftTree(num_steps=3, top_k=2, num_draft_tokens=6) if name == "keys_tree" else None,
        )  # fmt: skip
        options = DecoderOptions(logprobs=name == "split_logits")
        on_host = name in ("keys_lengths", "keys_updates") and platform.capabilities.task_update
        attention = choose_attention("host" if on_host else "device", platform).backend
        made = SpeculativeDecoder(target, head, platform, config, options, attention=attention, layout=layout)
        made.capture()
        if keys and made.drafter is not None:
            for part in (part for cache in (*made.target.caches, *made.drafter.caches) for part in cache):
                part.fill_(50.0)  # a read of a cell without a request's key then shows
        prompts = (1, 2) if name == "keys_none" else PROMPTS
        asked = asked_of(Scenario((prompts, prompts)), 0, seed)
        asked = [replace(request, temperature=1.0, seed=7) for request in asked] if sampled else asked
        given = made.generate(asked)
        length = made.metrics.mean_acceptance_length
        tokens = [token for result in given for token in result.token_ids[:7]]
        mine, others = layout.ranks.exchange("the tokens of the scenario", [*made.metrics.accepted[:1], *tokens])
        made.close()
    except RankError as error:
        return str(error)
    finally:
        layout.ranks.close()
    if sampled:
        return "" if mine == others else f"one rank accepted and sampled {mine}, the other {others}"
    if is_same and config.tree is None and length != config.num_speculative_tokens + 1:
        return f"the target as its own drafter has a mean acceptance length of {length:.2f}"
    whole = make_target(seed, torch.device("cpu"), compute=torch.float64)
    return shortfall(_of_one_kv_head(whole) if keys else whole, asked, given)


def split_target(seed: int, device: torch.device, ranks: TensorParallel) -> LlamaTarget:
    """Return this rank's part of `make_target`."""
    whole = make_target(seed, device)
    whole = _of_one_kv_head(whole) if ranks.context else whole
    layers = [_layer(layer, ranks) for layer in whole.layers]
    embed, head = _rows(whole.embed_tokens, ranks), _rows(whole.lm_head, ranks)
    return LlamaTarget(whole.sizes.split(ranks), embed, layers, whole.norm, head)


def split_eagle(seed: int, device: torch.device, ranks: TensorParallel) -> EagleHead:
    """Return this rank's part of `make_head("eagle")`."""
    whole = make_head("eagle", seed, device)
    assert isinstance(whole, EagleHead)
    sizes = replace(whole.sizes, num_kv_heads=1) if ranks.context else whole.sizes
    layers = [_layer(_with_one_kv_head(layer) if ranks.context else layer, ranks) for layer in whole.layers]
    embed, head = _rows(whole.embed_tokens, ranks), _rows(whole.lm_head, ranks)
    return EagleHead(sizes.split(ranks), embed, whole.fc, layers, head)


def _of_one_kv_head(whole: LlamaTarget) -> LlamaTarget:
    """Return the target with only the first KV head of each layer."""
    layers = [_with_one_kv_head(layer) for layer in whole.layers]
    config = replace(whole.sizes, num_kv_heads=1)
    return LlamaTarget(config, whole.embed_tokens, layers, whole.norm, whole.lm_head)


def _with_one_kv_head(layer: DecoderLayer) -> DecoderLayer:
    query, key, value = _parts(layer)
    return replace(layer, qkv=Weight(torch.cat([query, *(part[: CONFIG.head_dim] for part in (key, value))])))


def _parts(layer: DecoderLayer) -> list[Tensor]:
    """Return the query, key and value rows of a layer with any number of KV heads."""
    matrix, query = layer.qkv.matrix, CONFIG.num_heads * CONFIG.head_dim
    kv = (matrix.shape[0] - query) // 2
    return list(matrix.split([query, kv, kv]))


def _rows(matrix: Tensor, ranks: TensorParallel) -> Tensor:
    """Return this rank's rows of [n, columns]. Every rank has the same number of rows."""
    return matrix.chunk(ranks.size)[ranks.rank].contiguous()


def _columns(matrix: Tensor, ranks: TensorParallel) -> Tensor:
    return matrix.chunk(ranks.size, dim=1)[ranks.rank].contiguous()


def _layer(layer: DecoderLayer, ranks: TensorParallel) -> DecoderLayer:
    query, *keys = _parts(layer)
    if keys[0].shape[0] > CONFIG.head_dim:
        keys = [_rows(part, ranks) for part in keys]
    return replace(
        layer,
        qkv=Weight(torch.cat([_rows(query, ranks), *keys])),
        output=Weight(_columns(layer.output.matrix, ranks)),
        gate_up=Weight(torch.cat([_rows(part, ranks) for part in layer.gate_up.matrix.chunk(2)])),
        down=Weight(_columns(layer.down.matrix, ranks)),
        tensor_parallel=ranks,
    )
