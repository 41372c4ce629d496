"""Times one propose in several lowerings, with the same weights and the same batch, in one run."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from specgraph.attention import AttentionBackend, choose_attention
from specgraph.device import Platform
from specgraph.draft import DraftConfig, Drafter, DraftTree, ProposeBatch
from specgraph.engine.blocks import cache_dtype
from specgraph.errors import UnsupportedError
from specgraph.ops.library import dispatch_key_of, has_implementations, plain_torch
from specgraph.options import KVCacheDtype, LoweringChoice
from specgraph.parallel import WHOLE, TensorParallel
from specgraph.tools.floor import DeviceRates, propose_floor
from specgraph.tools.shapes import RandomHead, Weights, lone_drafter, random_head, shape_named
from specgraph.tools.timing import count_host_reads, count_issued, device_time, host_time, in_turns


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchCase:
    """The propose that is timed: one of K = `k` tokens for `requests` requests of `context` tokens each."""

    shape: str
    requests: int
    k: int
    context: int
    lowerings: tuple[LoweringChoice, ...] = ("eager", "step", "merged")
    sampled: bool = False
    """Also time drafts sampled at temperature 1, beside greedy ones."""
    weights: Weights = "plain"
    """Also time the head with its matrices stored so, where not plain."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """Also time it over KV caches in this dtype."""
    tree: DraftTree | None = None
    """Also time proposes of these trees, K steps deep."""
    torch_ops: bool = True
    """Also time eager with plain torch ops instead of the device's own kernels, where it has some."""
    repeats: int = 50
    tensor_parallel: TensorParallel = WHOLE
    """The ranks that split the head; all of them time together."""


def bench_propose(
    platform: Platform,
    case: BenchCase,
    *,
    dtype: torch.dtype,
    rates: DeviceRates | None = None,
) -> list[dict[str, Any]]:
    """Time the case in each lowering, and eager with plain torch ops.

    Args:
        dtype: of weights, activations and KV cache.
        rates: of the device; with them rows have `floor_us` and `ratio`.

    Returns:
        One row per lowering. Times are medians in microseconds: `device_us` and `host_us` of the draft loop alone,
        `propose_device_us` and `propose_host_us` with the batch handed over and the draft tokens copied out.
        `floor_us` is the time that reading weights and KV takes at these rates, or that the products take where they
        take longer (then also `flops_floor_us`); `ratio` is `device_us` over it. `kernel_floor_us` is the sum of the
        same over single kernels: see `propose_floor`.
        Rows of trees have neither. A lowering that the platform can't do has a row with `refused`, the reason.
    """
    length = _length(case)
    heads: dict[Weights, RandomHead] = {
        stored: random_head(shape_named(case.shape), platform.device, dtype, length, case.tensor_parallel, stored)
        for stored in dict.fromkeys(("plain", case.weights))
    }
    head = heads["plain"]
    attention = choose_attention("auto", platform, head.attention_layers, head.dtype).backend
    batch = propose_batch(head, case, platform.device, attention.preferred_block_size)
    prepared: list[_Prepared] = []
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for way in _ways(platform, case):
            try:
                drafter = _drafter(platform, heads[way.weights], case, way, length, attention)
            except UnsupportedError as error:
                rows.append(_names(case, way) | {"refused": str(error)})
                continue
            with way.ops():
                prepared.append(_prepare(platform, case, way, drafter, batch))
        for ready in in_turns(prepared, case.repeats):
            with ready.way.ops():
                ready.times["device_us"] += device_time(platform, ready.call, repeats=1, warmup=1)
                ready.times["host_us"] += host_time(platform, ready.call, repeats=1, warmup=0)
                ready.times["propose_device_us"] += device_time(platform, ready.propose, repeats=1, warmup=1)
                ready.times["propose_host_us"] += host_time(platform, ready.propose, repeats=1, warmup=0)
        for ready in prepared:
            rows.append(ready.row | _times(heads[ready.way.weights], case, ready, rates))
            ready.drafter.close()
    return rows


@dataclass(frozen=True, slots=True)
class _Way:
    """A lowering, and the implementation of its ops."""

    name: str
    lowering: LoweringChoice
    sampled: bool = False
    weights: Weights = "plain"
    kv_cache_dtype: KVCacheDtype = "auto"
    tree: DraftTree | None = None
    ops: Callable[[], AbstractContextManager[None]] = nullcontext
    """A context that every call runs in."""


def _ways(platform: Platform, case: BenchCase) -> list[_Way]:
    ways = [_Way(lowering, lowering) for lowering in case.lowerings]
    key = dispatch_key_of(platform.device)
    if case.torch_ops and "eager" in case.lowerings and has_implementations(key):
        ways.insert(0, _Way("eager, torch ops", "eager", ops=lambda: plain_torch(key)))
    trees = [replace(way, tree=case.tree) for way in ways] if case.tree is not None else []
    stored = [replace(way, weights=case.weights) for way in ways] if case.weights != "plain" else []
    if case.kv_cache_dtype != "auto":
        stored += [replace(way, kv_cache_dtype=case.kv_cache_dtype) for way in ways + stored]
    return ways + ([replace(way, sampled=True) for way in ways] if case.sampled else []) + stored + trees


@dataclass(slots=True)
class _Prepared:
    """A captured drafter with the batch in its buffers, and its times."""

    way: _Way
    drafter: Drafter
    call: Callable[[], None]
    """The draft loop over the batch that is in the buffers."""
    propose: Callable[[], Any]
    """The same, with the batch handed over and the draft tokens copied out."""
    row: dict[str, Any]
    times: dict[str, list[float]] = field(default_factory=lambda: defaultdict[str, list[float]](list))
    """Microseconds of every call, by the name of their median in the row."""


def _drafter(
    platform: Platform,
    head: RandomHead,
    case: BenchCase,
    way: _Way,
    length: int,
    attention: AttentionBackend,
) -> Drafter:
    config = DraftConfig(
        num_speculative_tokens=case.k,
        max_num_requests=case.requests,
        max_model_len=length,
        block_size=attention.preferred_block_size,
        capture_sizes=[case.requests],
        decode=way.lowering,
        sampled=way.sampled,
        tree=way.tree,
    )
    drafter = lone_drafter(platform, head, config, attention, cache_dtype(way.kv_cache_dtype, head.dtype))
    for cache in drafter.caches:
        for part in cache:
            part.copy_(torch.randn(part.shape, device=platform.device))
    return drafter


def _prepare(platform: Platform, case: BenchCase, way: _Way, drafter: Drafter, batch: ProposeBatch) -> _Prepared:
    reserved = platform.memory().reserved
    start = time.perf_counter()
    drafter.capture()
    platform.synchronize()
    capture_seconds = time.perf_counter() - start
    inputs = drafter.inputs(case.requests)
    counts, starts = _host_numbers(case)

    def propose(copied: ProposeBatch = batch, num_sampled: list[int] | None = counts) -> None:
        drafter.propose(copied, host_start_positions=starts, host_num_sampled=num_sampled)

    def call() -> None:
        drafter.propose(inputs, host_start_positions=starts, host_num_sampled=counts, copy=False)

    propose()  # leaves the batch in the drafter's memory
    before = drafter.launches["propose"]
    call()
    row = _names(case, way) | {
        "launches": drafter.launches["propose"] - before,
        "syncs": count_host_reads(call),
        "capture_seconds": round(capture_seconds, 3),
        "graphs": drafter.graphs.graph_count if drafter.graphs else 0,
        "graph_memory_bytes": platform.memory().reserved - reserved,
    }
    # Without the counts, as an engine that does not wait for its round hands it over.
    if issued := count_issued(platform, lambda: propose(num_sampled=None)):
        row["issued"] = issued
    return _Prepared(way, drafter, call, propose, row)


def _times(head: RandomHead, case: BenchCase, ready: _Prepared, rates: DeviceRates | None) -> dict[str, Any]:
    times = {name: round(statistics.median(each), 1) for name, each in ready.times.items()}
    if rates is None or ready.way.tree is not None:
        return times
    cached = cache_dtype(ready.way.kv_cache_dtype, head.dtype)
    floor = propose_floor(head, case.requests, case.k, case.context, rates, cached)
    return times | floor | {"ratio": round(statistics.median(ready.times["device_us"]) / floor["floor_us"], 3)}


def _names(case: BenchCase, way: _Way) -> dict[str, Any]:
    return {
        "shape": case.shape,
        "requests": case.requests,
        "k": case.k,
        "context": case.context,
        "lowering": way.name,
        "sampled": way.sampled,
        **({} if way.weights == "plain" else {"weights": way.weights}),
        **({} if way.kv_cache_dtype == "auto" else {"kv_cache_dtype": way.kv_cache_dtype}),
        **({} if way.tree is None else {"tree": str(way.tree)}),
    }


def propose_batch(head: RandomHead, case: BenchCase, device: torch.device, block_size: int) -> ProposeBatch:
    """Return a batch in which every other request has one accepted draft token; all requests end at `context`
    tokens."""
    n, q = case.requests, case.k + 1
    per_request = -(-_length(case) // block_size)
    counts, starts = _host_numbers(case)
    g = torch.Generator().manual_seed(0)
    vocab = shape_named(case.shape).vocab_size
    return ProposeBatch(
        sampled_token_ids=torch.randint(0, vocab, (n, q), generator=g).to(device),
        num_sampled=torch.tensor(counts, dtype=torch.int32, device=device),
        start_positions=torch.tensor(starts, device=device),
        aux_hidden=torch.randn(n * q, head.aux_size, generator=g).to(device, head.dtype),
        block_table=(torch.randperm(n * per_request, generator=g) + 1).view(n, per_request).int().to(device),
        temperature=torch.ones(n, device=device),
        seeds=torch.arange(n, device=device),
    )


def _host_numbers(case: BenchCase) -> tuple[list[int], list[int]]:
    """Return `num_sampled` and the start positions of the round."""
    counts = [1 + r % 2 for r in range(case.requests)]
    return counts, [case.context - count for count in counts]


def _length(case: BenchCase) -> int:
    """Return the KV slots of a request: the context, the rows of two rounds and the nodes of a tree."""
    return case.context + 2 * (case.k + 1) + (0 if case.tree is None else case.tree.scratch_tokens)
