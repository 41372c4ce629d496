"""Times whole rounds (verify, accept, propose) of a target with random weights that accepts draft tokens by chance."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from specgraph.attention import choose_attention
from specgraph.device import Platform
from specgraph.draft import DraftTree
from specgraph.engine import Chunk, EngineConfig, Request, SpeculativeDecoder
from specgraph.errors import ConfigError
from specgraph.models.llama import LlamaTarget
from specgraph.options import LoweringChoice
from specgraph.parallel import WHOLE, TensorParallel
from specgraph.tools.floor import DeviceRates, round_floor
from specgraph.tools.shapes import SHAPES, BenchShape, RandomHead, RandomWeights, model_config, random_head
from specgraph.tools.shapes import shape_named as drafter_named
from specgraph.tools.timing import in_turns

TARGETS: dict[str, BenchShape] = {
    "llama3-8b": replace(SHAPES["eagle3-llama3-8b"], num_layers=32),
    "qwen3-8b": replace(SHAPES["eagle3-qwen3-8b"], num_layers=36),
    "tiny-python": replace(SHAPES["eagle3-tiny-python"], num_layers=4),
}
"""Targets that `specgraph bench --target` knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundsCase:
    """The timed rounds: `requests` requests with prompts of `context` tokens, drafting K = `k` tokens."""

    target: str
    shape: str
    requests: int
    k: int
    context: int
    acceptance: float | tuple[float, ...]
    """See `EngineConfig.synthetic_acceptance`: one chance, or the share of drafts accepted at each of the K places."""
    tree: DraftTree | None = None
    """Also time rounds of these trees, K steps deep."""
    tree_acceptance: float | tuple[float, ...] | None = None
    """`acceptance` of the trees; by default the same."""
    lowerings: tuple[LoweringChoice, ...] = ("eager", "step", "merged")
    rounds: int = 20
    """Rounds per timed stretch."""
    repeats: int = 5
    """Timed stretches."""

    def acceptance_of(self, tree: DraftTree | None) -> float | tuple[float, ...]:
        """Return the acceptance of rounds of a tree, or of chains."""
        return self.acceptance if tree is None or self.tree_acceptance is None else self.tree_acceptance


def bench_rounds(
    platform: Platform, case: RoundsCase, *, dtype: torch.dtype, rates: DeviceRates | None = None
) -> list[dict[str, Any]]:
    """Time the case in each lowering, and with the target alone, in turns. Prefill is not timed.

    `eager` runs target and drafter without graphs; the other lowerings capture verify and propose.

    Returns:
        One row per lowering, with trees too where the case has some, and one of the target alone, with
        `tokens_per_second` and `round_ms` (medians). `same_tokens` is whether a lowering generated the same tokens as
        the first one with the same kind of drafts; it must be true. With `rates`, rows without trees also have the
        figures of `round_floor` at a context of `case.context` tokens, though contexts grow from round to round.
    Raises:
        ConfigError: there is no target of that name.
    """
    if case.target not in TARGETS:
        raise ConfigError(f"unknown target '{case.target}'; there are {', '.join(TARGETS)}")
    rounds = 2 + case.repeats * case.rounds
    length = case.context + (rounds + 2) * (case.k + 1)
    target = random_target(TARGETS[case.target], platform.device, dtype, length)
    head = random_head(drafter_named(case.shape), platform.device, dtype, length)
    g = torch.Generator().manual_seed(0)
    prompts: list[list[int]] = torch.randint(0, target.vocab_size, (case.requests, case.context), generator=g).tolist()
    requests = [Request(prompt_token_ids=prompt, max_tokens=length - case.context) for prompt in prompts]
    with torch.inference_mode():
        drafts = (None,) if case.tree is None else (None, case.tree)
        ways = [
            _way(platform, case, target, head, lowering, length, tree) for tree in drafts for lowering in case.lowerings
        ]
        ways.append(_way(platform, case, target, None, case.lowerings[-1], length))
        for way in ways:
            way.stream = way.decoder.stream(requests)
            way.advance(2 * case.requests)
        for way in in_turns(ways, case.repeats):
            platform.synchronize()
            start = time.perf_counter()
            tokens = way.advance(case.rounds * case.requests)
            platform.synchronize()
            way.seconds.append(time.perf_counter() - start)
            way.rates.append(tokens / way.seconds[-1])
        firsts = {way.tree: way for way in reversed(ways[:-1])}
        rows = [way.row | _figures(case, way, firsts[way.tree]) for way in ways]
        for row in rows:
            if rates is not None and "tree" not in row:
                drafter = head if row["k"] else None
                row |= round_floor(target, drafter, case.requests, row["k"], case.context, rates)
        for way in ways:
            way.decoder.close()
    return rows


def random_target(
    shape: BenchShape, device: torch.device, dtype: torch.dtype, max_model_len: int, ranks: TensorParallel = WHOLE
) -> LlamaTarget:
    """Return a target of this shape with random weights; split over `ranks`, this rank's part of it."""
    make = RandomWeights(device, dtype, ranks)
    return LlamaTarget(
        model_config(shape, dtype, max_model_len).split(ranks),
        make.matrix(shape.vocab_size, shape.hidden_size, 0),
        [make.layer(shape, shape.hidden_size) for _ in range(shape.num_layers)],
        make.norm(shape.hidden_size),
        make.matrix(shape.vocab_size, shape.hidden_size, 0),
    )


def captured_decoder(
    platform: Platform, target: LlamaTarget, head: RandomHead | None, **limits: Any
) -> SpeculativeDecoder:
    """Return a decoder of random weights, captured for batches of `max_num_requests` only.

    Args:
        limits: fields of `EngineConfig`; by default prompts are prefilled 512 tokens at a time, only decode rounds are
            captured, and attention chooses its block size.
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
    decoder = SpeculativeDecoder(target, head, platform, EngineConfig(**defaults | limits), attention=attention)
    decoder.capture()
    return decoder


def add_prompts(decoder: SpeculativeDecoder, prompts: Sequence[Sequence[int]]) -> None:
    """Add requests with these prompts (token ids) that generate until `max_model_len`."""
    for prompt in prompts:
        decoder.add(Request(prompt_token_ids=prompt, max_tokens=decoder.config.max_model_len - len(prompt)))


@dataclass(slots=True)
class _Way:
    """A decoder that is generating, its tokens so far and its times."""

    decoder: SpeculativeDecoder
    tree: DraftTree | None
    row: dict[str, Any]
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


def _way(
    platform: Platform,
    case: RoundsCase,
    target: LlamaTarget,
    head: RandomHead | None,
    lowering: LoweringChoice,
    length: int,
    tree: DraftTree | None = None,
) -> _Way:
    decoder = captured_decoder(
        platform,
        target,
        head,
        num_speculative_tokens=case.k,
        max_num_requests=case.requests,
        max_model_len=length,
        decode=lowering,
        synthetic_acceptance=case.acceptance_of(tree),
        tree=tree,
    )
    names = {"target": case.target, "shape": case.shape if head else None, "requests": case.requests}
    k = case.k if head else 0
    if tree is not None:
        names |= {"tree": str(tree)}
    names |= {"k": k, "context": case.context, "lowering": lowering if head else "target alone"}
    return _Way(decoder, tree, names)


def _figures(case: RoundsCase, way: _Way, first: _Way) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "tokens_per_second": round(statistics.median(way.rates), 1),
        "round_ms": round(statistics.median(way.seconds) / case.rounds * 1e3, 3),
    }
    if way.decoder.drafter is None:
        return figures
    return figures | {
        "acceptance": case.acceptance_of(way.tree),
        "mean_acceptance_length": round(way.decoder.metrics.mean_acceptance_length, 3),
        "same_tokens": way.tokens == first.tokens,
    }
