"""A drafter of the tiny pair on any platform, and simulated rounds moved to it."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import torch
from drafting.rounds import Rounds
from specgraph.decoding import allocate_caches
from specgraph.drafting import DraftConfig, Drafter, ProposeBatch
from specgraph.models.load import load_drafter, load_target
from specgraph.platforms import Platform
from torch import Tensor

VOCAB = 96


def make_drafter(pair: tuple[Path, Path], platform: Platform, lowering: str, k: int, **settings: object) -> Drafter:
    """A captured drafter."""
    limits = {"max_num_requests": 5, "max_model_len": 64, "block_size": 4, "capture_sizes": [1, 2, 5], **settings}
    config = DraftConfig(num_speculative_tokens=k, lowering=lowering, check_inputs=True, **limits)  # type: ignore[arg-type]
    target = load_target(pair[0], device=platform.device, dtype=torch.float32)
    head = load_drafter(pair[1], target)
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
    moved = {f.name: v.to(platform.device) for f in fields(batch) if isinstance(v := getattr(batch, f.name), Tensor)}
    return replace(batch, **moved)


def propose(drafter: Drafter, batch: ProposeBatch) -> Tensor:
    """Draft tokens, on the host."""
    with torch.inference_mode():
        return drafter.propose(on(drafter.platform, batch)).token_ids.cpu()
