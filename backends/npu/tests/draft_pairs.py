"""Drafters with random heads, the same on every platform, and batches for them."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from draft.rounds import Rounds
from specgraph.attention import AttentionBackend
from specgraph.device import Platform
from specgraph.draft import DraftConfig, Drafter, ProposeBatch
from specgraph.engine import allocate_caches
from specgraph.models.config import ModelConfig
from specgraph.models.decoder import AuxWeights
from specgraph.models.eagle3 import Eagle3Head
from specgraph.models.layers import DecoderLayer
from specgraph.models.protocol import DraftHead
from specgraph.ops.linear import Weight

VOCAB, DRAFT_VOCAB, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 96, 40, 32, 48, 4, 2, 8
MAX_REQUESTS, MAX_LEN, BLOCK = 5, 64, 4


def random_head(layers: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Eagle3Head:
    """An EAGLE-3 head with `layers` decoder layers and a reduced vocabulary, drawn from one seed."""
    g = torch.Generator().manual_seed(17)

    def matrix(*shape: int, scale: float = 0.25) -> Tensor:
        return (torch.randn(*shape, generator=g) * scale).to(device, dtype)

    def norm(size: int) -> Tensor:
        return (1 + torch.randn(size, generator=g) * 0.2).to(device, dtype)

    def layer(inputs: int) -> DecoderLayer:
        return DecoderLayer(
            qkv=Weight(matrix((HEADS + 2 * KV_HEADS) * HEAD_DIM, inputs)),
            output=Weight(matrix(HIDDEN, HEADS * HEAD_DIM)),
            post_norm=norm(HIDDEN),
            gate_up=Weight(matrix(2 * INNER, HIDDEN)),
            down=Weight(matrix(HIDDEN, INNER)),
            input_norm=norm(HIDDEN),
        )

    model = ModelConfig("llama", VOCAB, HIDDEN, INNER, layers, HEADS, KV_HEADS, HEAD_DIM, 1e-5, 128, False, dtype)
    chosen = torch.randperm(VOCAB, generator=g)[:DRAFT_VOCAB].sort().values
    weights = AuxWeights(
        embed_tokens=matrix(VOCAB, HIDDEN, scale=0.6),
        hidden_norm=norm(HIDDEN),
        norm=norm(HIDDEN),
        lm_head=matrix(DRAFT_VOCAB, HIDDEN, scale=0.4),
        fc=Weight(matrix(HIDDEN, 3 * HIDDEN)),
        draft_to_target=(chosen - torch.arange(DRAFT_VOCAB)).to(device),
    )
    decoder = [layer(2 * HIDDEN), *(layer(HIDDEN) for _ in range(layers - 1))]
    return Eagle3Head(model, weights, decoder, (1, 2, 3))


def moved(model: Any, device: torch.device) -> Any:
    """A model with all its tensors on a device; what shares memory goes on sharing it."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, map_location=device, weights_only=False)


def make_drafter(
    platform: Platform,
    attention: AttentionBackend,
    lowering: str,
    k: int,
    layers: int = 1,
    head: DraftHead | None = None,
    **settings: object,
) -> Drafter:
    """A captured drafter: EAGLE-3 with `layers` layers, or `head`."""
    head = moved(head, platform.device) if head else random_head(layers, platform.device)
    limits = {"max_num_requests": MAX_REQUESTS, "max_model_len": MAX_LEN, "block_size": BLOCK}
    config = DraftConfig(
        num_speculative_tokens=k, decode=lowering, **{**limits, "capture_sizes": [1, 2, 5], **settings}
    )  # type: ignore[arg-type]
    blocks = 1 + -(-config.max_model_len // config.block_size) * config.max_num_requests
    caches = allocate_caches(head.attention_layers, blocks, config.block_size, head.dtype, platform.device)
    drafter = Drafter(head, caches, platform, config, attention=attention)
    with torch.inference_mode():
        drafter.capture()
    return drafter


def rounds_for(drafter: Drafter, seed: int) -> Rounds:
    """Batches that shrink and grow."""
    return Rounds(drafter.config, drafter.head.aux_size, VOCAB, drafter.head.dtype, seed)


def on_device(batch: ProposeBatch, device: torch.device, *, late: bool = True) -> dict[str, Any]:
    """The arguments of `Drafter.propose` for a batch on a device, as an engine gives them: it knows the start
    positions, and the accepted counts only unless `late`."""
    moved: Mapping[str, Tensor] = {
        f.name: value.to(device) for f in fields(batch) if isinstance(value := getattr(batch, f.name), Tensor)
    }
    return {
        "batch": replace(batch, **moved),
        "host_start_positions": batch.start_positions.tolist(),
        "host_num_sampled": None if late else batch.num_sampled.tolist(),
    }


def propose(drafter: Drafter, batch: ProposeBatch, *, late: bool = True) -> Tensor:
    """Draft tokens of one propose, on the host."""
    with torch.inference_mode():
        return drafter.propose(**on_device(batch, drafter.platform.device, late=late)).token_ids.cpu()
