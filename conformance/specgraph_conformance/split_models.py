"""A target and its drafter split over two ranks with the same requests, and what must come of it.

Each rank holds some heads, inner columns and tokens of the vocabulary, cut here from the whole tensors as
`specgraph.parallel.TensorParallel` describes; the core cuts checkpoints while it reads them. The tokens must be those
of the whole target in float64.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from specgraph.device import Platform
from specgraph.engine import EngineConfig, SpeculativeDecoder
from specgraph.errors import RankError
from specgraph.models.draft_model import DraftModelHead
from specgraph.models.eagle import EagleHead
from specgraph.models.layers import DecoderLayer
from specgraph.models.llama import LlamaTarget
from specgraph.ops.linear import Weight
from specgraph.parallel import TensorParallel, join_layout
from torch import Tensor

from specgraph_conformance.shared_experts import CHUNK, LENGTH, Scenario, asked_of, shortfall
from specgraph_conformance.tiny_models import CONFIG, HIDDEN, make_head, make_target

PROMPTS = (5, 2 * CHUNK - 3)
SPLIT = ("split", "split_logits", "split_sampled")
"""Scenarios. `split`: greedy tokens from each rank's most likely ones, and a drafter with the target's own weights,
which must agree with it. `split_logits`: an EAGLE head, and log-probabilities, for which logits are gathered.
`split_sampled`: an EAGLE head, drafts and tokens drawn by each rank for itself, which must be the same."""


def run_split(platform: Platform, name: str, seed: int, timeout: float) -> str:
    """One of SPLIT, on every rank together.

    Returns:
        What went wrong; empty where nothing did.
    """
    layout = join_layout(platform.device, tensor_parallel=2, timeout=timeout)
    try:
        ranks, device = layout.tensor_parallel, platform.device
        target = split_target(seed, device, ranks)
        is_same, sampled = name == "split", name == "split_sampled"
        head = (
            DraftModelHead(split_target(seed, device, ranks), HIDDEN) if is_same else split_eagle(seed, device, ranks)
        )
        config = EngineConfig(
            num_speculative_tokens=3, max_num_requests=2, max_model_len=LENGTH, capture_sizes=(2,),
            prefill_sizes=(CHUNK,), decode="merged", prefill="full", logprobs=name == "split_logits", sampled=sampled,
        )  # fmt: skip
        made = SpeculativeDecoder(target, head, platform, config, layout=layout)
        made.capture()
        asked = asked_of(Scenario((PROMPTS, PROMPTS)), 0, seed)
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
    if is_same and length != config.num_speculative_tokens + 1:
        return f"the target as its own drafter has a mean acceptance length of {length:.2f}"
    return shortfall(make_target(seed, torch.device("cpu"), compute=torch.float64), asked, given)


def split_target(seed: int, device: torch.device, ranks: TensorParallel) -> LlamaTarget:
    """This rank's part of `make_target`."""
    whole = make_target(seed, device)
    layers = [_layer(layer, ranks) for layer in whole.layers]
    embed, head = _rows(whole.embed_tokens, ranks), _rows(whole.lm_head, ranks)
    return LlamaTarget(whole.config.split(ranks), embed, layers, whole.norm, head)


def split_eagle(seed: int, device: torch.device, ranks: TensorParallel) -> EagleHead:
    """This rank's part of `make_head("eagle")`."""
    whole = make_head("eagle", seed, device)
    assert isinstance(whole, EagleHead)
    layers = [_layer(layer, ranks) for layer in whole.layers]
    embed, head = _rows(whole.embed_tokens, ranks), _rows(whole.lm_head, ranks)
    return EagleHead(whole.sizes.split(ranks), embed, whole.fc, layers, head)


def _rows(matrix: Tensor, ranks: TensorParallel) -> Tensor:
    """This rank's rows of [n, columns], as many on every rank."""
    return matrix.chunk(ranks.size)[ranks.rank].contiguous()


def _columns(matrix: Tensor, ranks: TensorParallel) -> Tensor:
    return matrix.chunk(ranks.size, dim=1)[ranks.rank].contiguous()


def _layer(layer: DecoderLayer, ranks: TensorParallel) -> DecoderLayer:
    heads, kv_heads, dim = CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_dim
    qkv = layer.qkv.matrix.split([heads * dim, kv_heads * dim, kv_heads * dim])
    return replace(
        layer,
        qkv=Weight(torch.cat([_rows(part, ranks) for part in qkv])),
        output=Weight(_columns(layer.output.matrix, ranks)),
        gate_up=Weight(torch.cat([_rows(part, ranks) for part in layer.gate_up.matrix.chunk(2)])),
        down=Weight(_columns(layer.down.matrix, ranks)),
        tensor_parallel=ranks,
    )
