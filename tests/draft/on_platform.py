"""Small drafters of every kind and their batches, the same on every platform."""

from __future__ import annotations

import io
from dataclasses import fields, replace
from typing import Any

import torch
from draft import rounds
from draft.pairs import VOCAB, draw_of, eagle3_of, make_head, make_target
from draft.rounds import RandomBatches
from specgraph_conformance.decode_rig import decoder_settings
from specgraph_run.decoder import Request, SpeculativeDecoder
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
    layers: int = 0,
    head: Any = None,
    attention: AttentionBackend | None = None,
    **settings: object,
) -> Drafter:
    """Make a captured drafter of a kind, of EAGLE-3 with `layers` layers, or with a `head` of the test's own."""
    made = eagle3_of(layers, draw_of(3, torch.float32)) if layers else make_head(kind, make_target())
    head = moved(made if head is None else head, platform.device)
    limits = {"num_speculative_tokens": k, "max_num_requests": 5, "max_model_len": 64, "capture_sizes": [1, 2, 5]}
    given = {**limits, "prefill_sizes": [16], "check_inputs": False, **settings}
    return rounds.make_drafter(head, lowering, attention, platform=platform, **given)


def batches_for(drafter: Drafter, seed: int) -> RandomBatches:
    """Batches that grow and shrink, the same for every drafter of one config."""
    return RandomBatches(drafter.config, drafter.head.aux_size, VOCAB, drafter.head.dtype, seed)


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


RAGGED = {
    "dspark-ragged": {"verified_drafts": 1.25},
    "dspark-ragged-auto": {
        "verified_drafts": 1.25, "k_candidates": (1, 2, 3), "round_times": {3: {1: 10.0, 2: 11.0, 3: 12.0}},
    },
}  # fmt: skip
"""Options of decoders whose verifies take the likeliest drafts."""


def decoded(
    platform: Platform, kind: str, lowering: str, k: int, attention: AttentionBackend | None = None
) -> tuple[tuple[list[list[int]], list[float]], dict[str, int]]:
    """(tokens, acceptance), and what the platform counted, of four prompts in a batch of three; every second is drawn
    at temperature 1, from drafts that are drawn too."""
    target = make_target()
    head = make_head(kind.split("-")[0] if kind in RAGGED else kind, target)
    target, head = moved((target, head), platform.device)
    config = decoder_settings(
        num_speculative_tokens=k, max_num_requests=3, max_model_len=48, block_size=4, decode=lowering, sampled=True,
        capture_sizes=[3], prefill_sizes=[16], **RAGGED.get(kind, {}),
    )  # fmt: skip
    decoder = SpeculativeDecoder(target, head, platform, *config, attention=attention)
    g = torch.Generator().manual_seed(9)
    prompts = [torch.randint(0, VOCAB, (n,), generator=g).tolist() for n in (3, 9, 1, 14)]
    requests = [
        Request(prompt_token_ids=prompt, max_tokens=8 + 2 * i, temperature=i % 2, seed=i)
        for i, prompt in enumerate(prompts)
    ]
    with torch.inference_mode():
        decoder.capture()
        before = platform.counts()
        results = decoder.generate(requests)
        spent = {name: count - before[name] for name, count in platform.counts().items()}
    decoder.close()
    return ([result.token_ids for result in results], decoder.metrics.acceptance_per_position), spent
