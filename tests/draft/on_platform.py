"""Small drafters of every kind and their batches, the same on every platform."""

from __future__ import annotations

import io
from dataclasses import fields, replace
from typing import Any

import torch
from draft import rounds
from draft.pairs import VOCAB, make_head, make_target
from draft.rounds import Rounds
from torch import Tensor

from specgraph.attention import AttentionBackend
from specgraph.device import Platform
from specgraph.draft import Drafter, ProposeBatch


def moved(model: Any, device: torch.device) -> Any:
    """A model with all its tensors on a device; what shares memory goes on sharing it."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, map_location=device, weights_only=False)


def make_drafter(
    platform: Platform,
    lowering: str,
    k: int,
    kind: str = "eagle3",
    *,
    layers: int = 1,
    head: Any = None,
    attention: AttentionBackend | None = None,
    **settings: object,
) -> Drafter:
    """Make a captured drafter of a kind, or with a `head` of the test's own, on whatever device that is."""
    head = moved(make_head(kind, make_target(), layers) if head is None else head, platform.device)
    limits = {"num_speculative_tokens": k, "max_num_requests": 5, "max_model_len": 64, "capture_sizes": [1, 2, 5]}
    given = {**limits, "prefill_sizes": [16], "check_inputs": False, **settings}
    return rounds.make_drafter(head, lowering, attention, platform=platform, **given)


def rounds_for(drafter: Drafter, seed: int) -> Rounds:
    """Batches that grow and shrink, the same for every drafter of one config."""
    return Rounds(drafter.config, drafter.head.aux_size, VOCAB, drafter.head.dtype, seed)


def on_device(batch: ProposeBatch, device: torch.device) -> ProposeBatch:
    """The batch with its tensors on a device."""
    tensors = {f.name: v.to(device) for f in fields(batch) if isinstance(v := getattr(batch, f.name), Tensor)}
    return replace(batch, **tensors)


def propose(drafter: Drafter, batch: ProposeBatch, *, late: bool = True) -> Tensor:
    """Draft tokens on the host. The drafter is told the start positions, and the accepted counts unless `late`."""
    with torch.inference_mode():
        return drafter.propose(**arguments(batch, drafter.platform.device, late=late)).token_ids.cpu()


def arguments(batch: ProposeBatch, device: torch.device, *, late: bool = True) -> dict[str, Any]:
    """The arguments of `Drafter.propose`, as an engine gives them: on a device, with what its host knows."""
    return {
        "batch": on_device(batch, device),
        "host_start_positions": batch.start_positions.tolist(),
        "host_num_sampled": None if late else batch.num_sampled.tolist(),
    }
