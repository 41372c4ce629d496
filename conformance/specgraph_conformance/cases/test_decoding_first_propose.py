"""What an engine hands to the drafter after a prompt, against a float64 target and EAGLE head of the suite's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from specgraph.attention import KVCache
from specgraph.decoding import Request
from specgraph.platforms import Platform
from torch import Tensor

from specgraph_conformance.case import case
from specgraph_conformance.decode_rig import MODEL_SEED, decoder
from specgraph_conformance.dense_models import first_drafts, run_target
from specgraph_conformance.rig import on_host
from specgraph_conformance.tiny_models import VOCAB, make_head, make_target

CHUNKS: dict[str, dict[str, Any]] = {
    "one-chunk": {"prefill_sizes": (64,)},
    "several-chunks": {"prefill_sizes": (16,), "prefill_chunk": 7},
}
K = 4
HOST = torch.device("cpu")


def prompts(seed: int, count: int) -> list[list[int]]:
    """Random prompts of 2 to 60 tokens, all of another length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (2 + (r * 17) % 59,), generator=generator).tolist() for r in range(count)]


@pytest.mark.parametrize("chunks", CHUNKS)
@case(
    "decoding.first-propose-is-accepted",
    "The first drafts after a prompt, prefilled in one or several chunks, are accepted as often as those of a float64 "
    "drafter: greedy output is lossless with bad drafts too, so only their acceptance shows them.",
    hazard="bad-first-drafts",
    cause="the propose after a prompt takes another row's hidden state or token, or prompt chunks are shifted",
    timeout=120,
)
def test_first_propose(platform: Platform, chunks: str, seed: int) -> None:
    target = make_target(MODEL_SEED, HOST, compute=torch.float64)
    head = make_head("eagle", MODEL_SEED, HOST, compute=torch.float64)
    asked, expected = prompts(seed, 20), [0] * K
    for prompt in asked:
        drafts, own, _ = first_drafts(target, head, prompt, K)
        for position in range(next((i for i in range(K) if drafts[i] != own[i + 1]), K)):
            expected[position] += 1
    with decoder(platform, max_num_requests=9, capture_sizes=(9,), k=K, **CHUNKS[chunks]) as made:
        # The second token comes with the verify of the first drafts, and nothing is verified after it.
        made.generate([Request(prompt_token_ids=prompt, max_tokens=2) for prompt in asked])
        metrics = made.metrics
    assert expected[0] >= 5, "the tiny pair accepts too little for this to say much: choose another seed"
    assert metrics.num_drafts == len(asked)
    for position, (seen, wanted) in enumerate(zip(metrics.accepted, expected, strict=True)):
        # One request may differ where two float64 logits nearly tie.
        assert abs(seen - wanted) <= 1, (
            f"draft token {position} after the prompt was accepted for {seen} of {len(asked)} requests; a float64 "
            f"drafter's is for {wanted}"
        )


@pytest.mark.parametrize("chunks", CHUNKS)
@case(
    "decoding.prompt-keys-are-float64s",
    "After a prompt, prefilled in one or in several chunks, the caches of target and drafter hold the keys that a "
    "float64 model has, rotated by exact angles.",
    hazard="prompt-keys",
    cause="a rotary table in half precision, prompt positions that are shifted, or rows of the wrong hidden states",
    timeout=120,
)
def test_prompt_keys(platform: Platform, chunks: str, seed: int) -> None:
    target = make_target(MODEL_SEED, HOST, compute=torch.float64)
    head = make_head("eagle", MODEL_SEED, HOST, compute=torch.float64)
    (prompt,) = [prompt for prompt in prompts(seed, 20) if len(prompt) == max(map(len, prompts(seed, 20)))][:1]
    with decoder(platform, k=K, **CHUNKS[chunks]) as made:
        made.generate([Request(prompt_token_ids=prompt, max_tokens=1)])
        assert made.drafter is not None
        caches = {"target": list(made.target.caches), "drafter": list(made.drafter.caches)}
    wanted = {"target": run_target(target, prompt).keys, "drafter": first_drafts(target, head, prompt, 1)[2].keys}
    for who, layers in wanted.items():
        for layer, (keys, cache) in enumerate(zip(layers, caches[who], strict=True)):
            expect_stored(cache, keys, f"layer {layer} of the {who}")


def expect_stored(cache: KVCache, keys: Tensor, where: str) -> None:
    """Each of `keys` [n, kv_heads, dim] is in some slot of a cache that held nothing else than zeros."""
    slots = on_host(cache.key)[1:].flatten(0, 1).flatten(1).double()
    slots = slots[slots.abs().amax(dim=1) > 0]
    off = (keys.flatten(1)[:, None] - slots[None]).abs().amax(dim=2)
    nearest, slot = off.min(dim=1)
    wrong = (nearest > 2e-3).nonzero().flatten().tolist()
    assert not wrong, (
        f"{where}: no slot holds the key of position {wrong[0]} ({len(wrong)} of {len(keys)} positions); the nearest "
        f"is off by {float(nearest[wrong[0]]):.3g}"
    )
    assert len(set(slot.tolist())) == len(keys), f"{where}: two positions share a slot"
