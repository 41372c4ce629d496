"""Times whole rounds of a target with random weights, which accepts draft tokens with a given probability."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from specgraph_models.llama import LlamaTarget

from specgraph.attention import choose_attention
from specgraph.config import DraftConfig
from specgraph.device import Platform
from specgraph_run.decoder import Chunk, DecoderOptions, Request, SpeculativeDecoder
from specgraph_run.tools.floor import DeviceRates, round_floor
from specgraph_run.tools.propose import BenchCase
from specgraph_run.tools.shapes import SHAPES, BenchShape, RandomHead, RandomWeights, model_config, random_head
from specgraph_run.tools.timing import in_turns

TARGETS: dict[str, BenchShape] = {
    "llama3-8b": replace(SHAPES["eagle3-llama3-8b"], num_layers=32),
    "qwen3-8b": replace(SHAPES["eagle3-qwen3-8b"], num_layers=36),
    "tiny-python": replace(SHAPES["eagle3-tiny-python"], num_layers=4),
}
"""Targets that `specgraph bench --target` knows."""


def bench_rounds(
    platform: Platform,
    case: BenchCase,
    target: str,
    acceptance: float | tuple[float, ...],
    *,
    dtype: torch.dtype,
    rates: DeviceRates | None = None,
    rounds: int = 20,
    repeats: int = 5,
) -> list[dict[str, Any]]:
    """Time the rounds of a case in each lowering, and decoding by the target alone, in turns. Prefill is not timed.

    `eager` runs target and drafter without graphs; the other lowerings capture verify and propose.

    Args:
        target: a name in TARGETS.
        acceptance: the chance that a draft token is accepted, or the accepted share of drafts per position; see
            `DecoderOptions.synthetic_acceptance`.
        rounds: the number of rounds in a timed stretch.
        repeats: the number of timed stretches.

    Returns:
        One row per lowering, and one for the target alone.
        `tokens_per_second` and `round_ms` are medians. `tokens_per_second_least` and `tokens_per_second_most` are the
        spread.
        `same_tokens` is True if the lowering generated the same tokens as the first one; anything else is a bug.
        With `rates`, rows without trees have the keys of `round_floor`. It is the floor at `case.context` tokens,
        though contexts grow from round to round.
    """
    length = case.context + (4 + repeats * rounds) * (case.k + 1)
    verifying = random_target(TARGETS[target], platform.device, dtype, length)
    head = random_head(SHAPES[case.shape], platform.device, dtype, length)
    g = torch.Generator().manual_seed(0)
    prompts: list[list[int]] = torch.randint(
        0, verifying.vocab_size, (case.requests, case.context), generator=g
    ).tolist()
    requests = [Request(prompt_token_ids=prompt, max_tokens=length - case.context) for prompt in prompts]
    limits = {"num_speculative_tokens": case.k, "max_num_requests": case.requests, "max_model_len": length}
    limits |= {"tree": case.tree}
    options = DecoderOptions(synthetic_acceptance=acceptance)
    drafters = [*((head, lowering) for lowering in case.lowerings), (None, case.lowerings[-1])]
    with torch.inference_mode():
        ways = [
            _Way(captured_decoder(platform, verifying, drafter, options, decode=lowering, **limits))
            for drafter, lowering in drafters
        ]
        for way in ways:
            way.stream = way.decoder.stream(requests)
            way.advance(2 * case.requests)
        for way in in_turns(ways, repeats):
            platform.synchronize()
            start = time.perf_counter()
            tokens = way.advance(rounds * case.requests)
            platform.synchronize()
            way.seconds.append(time.perf_counter() - start)
            way.rates.append(tokens / way.seconds[-1])
    rows: list[dict[str, Any]] = []
    for way, (drafter, lowering) in zip(ways, drafters, strict=True):
        k = 0 if drafter is None else case.k
        row = {"target": target, "shape": case.shape if drafter else None, "requests": case.requests, "k": k}
        row |= {"context": case.context, "lowering": lowering if drafter else "target alone"}
        row |= {
            "tokens_per_second": round(statistics.median(way.rates), 1),
            "tokens_per_second_least": round(min(way.rates), 1),
            "tokens_per_second_most": round(max(way.rates), 1),
            "round_ms": round(statistics.median(way.seconds) / rounds * 1e3, 3),
        }
        if drafter is not None:
            row |= {
                "acceptance": acceptance,
                "mean_acceptance_length": round(way.decoder.metrics.mean_acceptance_length, 3),
                "same_tokens": way.tokens == ways[0].tokens,
            }
        if rates is not None and (drafter is None or case.tree is None):
            row |= round_floor(verifying, drafter, case.requests, k, case.context, rates)
        rows.append(row)
        way.decoder.close()
    return rows


def random_target(shape: BenchShape, device: torch.device, dtype: torch.dtype, max_model_len: int) -> LlamaTarget:
    """Return a target of this shape with random weights."""
    make = RandomWeights(device, dtype)
    return LlamaTarget(
        model_config(shape, dtype, max_model_len),
        make.matrix(shape.vocab_size, shape.hidden_size),
        [make.layer(shape, shape.hidden_size) for _ in range(shape.num_layers)],
        make.norm(shape.hidden_size),
        make.matrix(shape.vocab_size, shape.hidden_size),
    )


def captured_decoder(
    platform: Platform, target: LlamaTarget, head: RandomHead | None, options: DecoderOptions, **limits: Any
) -> SpeculativeDecoder:
    """Return a captured decoder.

    Args:
        limits: fields of `DraftConfig`, with at least `max_num_requests` and `max_model_len`. By default one batch size
            is captured, `max_num_requests`. Prefill is eager with 512 tokens per pass, and attention chooses its block
            size.
    """
    layers = [*target.attention_layers, *(head.attention_layers if head is not None else ())]
    trees = limits.get("tree") is not None
    attention = choose_attention("auto", platform, layers, target.dtype, trees=trees).backend
    defaults: dict[str, Any] = {
        "block_size": attention.preferred_block_size,
        "capture_sizes": [limits["max_num_requests"]],
        "prefill_sizes": [min(512, limits["max_model_len"])],
        "prefill": "eager",
    }
    decoder = SpeculativeDecoder(target, head, platform, DraftConfig(**defaults | limits), options, attention=attention)
    decoder.capture()
    return decoder


@dataclass(slots=True)
class _Way:
    """A decoder that is generating, with its tokens and times so far."""

    decoder: SpeculativeDecoder
    stream: Iterator[Chunk] = field(default_factory=lambda: iter(()))
    tokens: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    seconds: list[float] = field(default_factory=list[float])
    rates: list[float] = field(default_factory=list[float])

    def advance(self, chunks: int) -> int:
        """Take this many chunks (one per request and round) and return the number of tokens in them."""
        count = 0
        for _ in range(chunks):
            chunk = next(self.stream)
            self.tokens.setdefault(chunk.request, []).extend(chunk.token_ids)
            count += len(chunk.token_ids)
        return count
