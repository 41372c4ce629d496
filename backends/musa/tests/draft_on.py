"""Drafters of small random models on any platform, and simulated rounds moved to it."""

from __future__ import annotations

import io
from dataclasses import fields, replace
from typing import Any

import torch
from draft.pairs import VOCAB, make_head, make_target
from draft.rounds import Rounds
from specgraph.device import Platform
from specgraph.draft import DraftConfig, Drafter, ProposeBatch
from specgraph.engine import allocate_caches
from torch import Tensor

KINDS = ("eagle", "eagle3", "mtp", "mtp-modules", "dflash", "draft-model")


def moved(model: Any, device: torch.device) -> Any:
    """A copy of a model with every tensor on `device`."""
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, map_location=device, weights_only=False)


def target_and_head(kind: str, platform: Platform) -> tuple[Any, Any]:
    """A target and a drafter of a kind for it, on the platform's device."""
    target = make_target()
    return moved((target, make_head(kind, target)), platform.device)


def make_drafter(platform: Platform, lowering: str, k: int, kind: str = "eagle3", **settings: object) -> Drafter:
    """A captured drafter."""
    limits = {
        "max_num_requests": 5,
        "max_model_len": 64,
        "block_size": 4,
        "capture_sizes": [1, 2, 5],
        "prefill_sizes": [16],
        **settings,
    }
    config = DraftConfig(num_speculative_tokens=k, decode=lowering, check_inputs=True, **limits)  # type: ignore[arg-type]
    return captured_drafter(target_and_head(kind, platform)[1], platform, config)


def captured_drafter(head: Any, platform: Platform, config: DraftConfig) -> Drafter:
    """A drafter with a KV cache for its largest batch, captured."""
    blocks = 1 + -(-config.max_model_len // config.block_size) * config.max_num_requests
    caches = allocate_caches(head.attention_layers, blocks, config.block_size, head.dtype, platform.device)
    drafter = Drafter(head, caches, platform, config)
    with torch.inference_mode():
        drafter.capture()
    return drafter


def rounds_for(drafter: Drafter, seed: int) -> Rounds:
    """Batches that grow and shrink, the same for every drafter of one config."""
    return Rounds(drafter.config, drafter.head.aux_size, VOCAB, torch.float32, seed)


def on(platform: Platform, batch: ProposeBatch) -> ProposeBatch:
    """The batch with its tensors on the platform's device."""
    tensors = {f.name: v.to(platform.device) for f in fields(batch) if isinstance(v := getattr(batch, f.name), Tensor)}
    return replace(batch, **tensors)


def propose(drafter: Drafter, batch: ProposeBatch) -> Tensor:
    """Draft tokens, on the host."""
    with torch.inference_mode():
        return drafter.propose(on(drafter.platform, batch)).token_ids.cpu()
