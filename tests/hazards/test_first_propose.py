"""The first propose after a prompt, against a float64 target and EAGLE head of the tests' own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hazards.dense_models import float64_pair, prompt_rows, reads_hidden_states, run_target, short_of_best
from specgraph_conformance.decode_rig import decoder
from specgraph_conformance.rig import on_host
from specgraph_conformance.tiny_models import VOCAB
from specgraph_run.decoder import Request, SpeculativeDecoder
from torch import Tensor

from specgraph.attention import KVCache
from specgraph.device import Platform

K, REQUESTS = 4, 11
CHUNKS: dict[str, dict[str, Any]] = {
    "one-chunk": {"prefill_sizes": (64,)},
    "several-chunks": {"prefill_sizes": (7,)},
}


def prompts(seed: int, count: int) -> list[list[int]]:
    """Return random prompts of 2 to 60 tokens, with different lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (2 + (r * 17) % 59,), generator=generator).tolist() for r in range(count)]


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.hazard("bad-first-drafts")
def test_first_drafts_are_float64s(platform: Platform, chunks: str, seed: int) -> None:
    """The first drafts after a prompt, prefilled in one or several chunks, are those of a float64 drafter (greedy
    output is the same with bad drafts and does not show them)."""
    target, head = float64_pair()
    reads_hidden_states(head)
    asked = prompts(seed, REQUESTS)
    limits = {"max_num_requests": REQUESTS, "capture_sizes": (REQUESTS,), "k": K, "rounds_ahead": 0}
    with decoder(platform, **limits, **CHUNKS[chunks]) as made:
        assert made.drafter is not None
        reads_hidden_states(made.drafter.head)
        first_round(made, asked)
        drafts = on_host(made.drafter.buffers.draft_token_ids)[:REQUESTS, :K].tolist()
    for number, (prompt, drafted) in enumerate(zip(asked, drafts, strict=True)):
        short = short_of_best(target, head, prompt, drafted)
        assert max(short) < 0.02, (
            f"request {number} ({len(prompt)} prompt tokens) drafted {drafted}; in float64 their logits are "
            f"{[round(value, 2) for value in short]} lower than the best"
        )


@pytest.mark.hazard("noise-of-the-chunk")
def test_first_tokens_are_one_noise(platform: Platform, seed: int) -> None:
    """The first token after a prompt is drawn by the noise of its own position, in however many chunks the prompt was
    prefilled."""
    drawn: list[list[int]] = []
    for chunks in CHUNKS.values():
        with decoder(platform, k=K, sampled=True, **chunks) as made:
            # At this temperature logits don't matter: the noise of seed and position alone picks the tokens.
            asked = [
                Request(prompt_token_ids=prompt, max_tokens=1, temperature=1e6, seed=number)
                for number, prompt in enumerate(prompts(seed, REQUESTS))
            ]
            drawn.append([result.token_ids[0] for result in made.generate(asked)])
    assert drawn[0] == drawn[1], f"first tokens {drawn[1]} in several chunks, {drawn[0]} in one"


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.hazard("prompt-keys")
def test_prompt_keys_are_float64s(platform: Platform, chunks: str, seed: int) -> None:
    """After a prompt, prefilled in one or in several chunks, the caches of target and drafter hold the keys that a
    float64 model has, rotated by exact angles."""
    target, head = float64_pair()
    (prompt,) = [prompt for prompt in prompts(seed, 20) if len(prompt) == max(map(len, prompts(seed, 20)))][:1]
    with decoder(platform, k=K, rounds_ahead=0, **CHUNKS[chunks]) as made:
        first_round(made, [prompt])
        assert made.drafter is not None
        caches = {"target": list(made.target.caches), "drafter": list(made.drafter.caches)}
    wanted = {"target": run_target(target, prompt).keys, "drafter": prompt_rows(target, head, prompt)[2].keys}
    for who, layers in wanted.items():
        for layer, (keys, cache) in enumerate(zip(layers, caches[who], strict=True)):
            expect_stored(cache, keys, f"layer {layer} of the {who}")


def first_round(made: SpeculativeDecoder, prompts: Sequence[Sequence[int]]) -> None:
    """Prefill prompts, and run their first round. It begins with their first propose."""
    for prompt in prompts:
        made.add(Request(prompt_token_ids=prompt, max_tokens=20))
    made.step()
    made.step()


def expect_stored(cache: KVCache, keys: Tensor, where: str) -> None:
    """Check that each of `keys` [n, kv_heads, dim] is in some slot of a cache that held only zeros before."""
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
