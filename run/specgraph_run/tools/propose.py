"""Times one propose in several lowerings, with the same weights and batch, in one run."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from specgraph.attention import AttentionBackend, choose_attention
from specgraph.config import LoweringChoice
from specgraph.device import Platform
from specgraph.draft import DraftConfig, Drafter, DraftTree, ProposeBatch
from specgraph.errors import UnsupportedError
from specgraph.ops.library import dispatch_key_of, has_implementations, plain_torch
from specgraph_run.decoder.blocks import cache_dtype
from specgraph_run.options import KVCacheDtype, StoredWeights
from specgraph_run.tools.floor import DeviceRates, propose_floor
from specgraph_run.tools.shapes import SHAPES, RandomHead, lone_drafter, random_head
from specgraph_run.tools.timing import count_issued, device_time, host_time, in_turns


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchCase:
    """A propose to time in each lowering: `k` draft tokens for `requests` requests of `context` tokens each."""

    shape: str
    """A name in SHAPES."""
    requests: int
    k: int
    context: int
    lowerings: tuple[LoweringChoice, ...] = ("eager", "step", "merged")
    sampled: bool = False
    """If True, drafts are sampled at temperature 1. Otherwise they are greedy."""
    weights: StoredWeights = "plain"
    kv_cache_dtype: KVCacheDtype = "auto"
    tree: DraftTree | None = None
    """The draft tree, K draft steps deep. None drafts chains."""
    torch_ops: bool = True
    """Also time eager with plain torch ops, if the device has kernels of its own."""
    repeats: int = 50

    @property
    def max_model_len(self) -> int:
        """The KV slots of a request: its context, the rows of two rounds, and the nodes of a tree."""
        return self.context + 2 * (self.k + 1) + (0 if self.tree is None else self.tree.scratch_tokens)


def bench_propose(
    platform: Platform, case: BenchCase, *, dtype: torch.dtype, rates: DeviceRates | None = None
) -> list[dict[str, Any]]:
    """Time the case in each lowering, and eager with plain torch ops.

    Args:
        dtype: the dtype of weights, activations and, with `kv_cache_dtype` "auto", of the KV cache.
        rates: the device's rates. If they are given, rows have `floor_us` and `ratio`.

    Returns:
        One row per lowering. Times are medians in microseconds.
        `device_us` and `host_us` time the draft loop alone. `device_us_least` and `device_us_most` are the spread.
        `propose_device_us` and `propose_host_us` include copying the batch in and the draft tokens out.
        `capture_seconds` and `graph_memory_bytes` are the cost of start-up.
        `floor_us` and the other floors come from `propose_floor`; `ratio` is `device_us` / `floor_us`. Rows of trees
        have no floor and no ratio.
        If the platform can't do a lowering, its row has the reason, `refused`.
    """
    head = random_head(SHAPES[case.shape], platform.device, dtype, case.max_model_len, case.weights)
    cached = cache_dtype(case.kv_cache_dtype, head.dtype)
    attention = choose_attention("auto", platform, head.attention_layers, head.dtype).backend
    batch = propose_batch(head, case, platform.device, attention.preferred_block_size)
    key = dispatch_key_of(platform.device)
    ways: list[tuple[str, LoweringChoice, Callable[[], AbstractContextManager[None]]]]
    ways = [(lowering, lowering, nullcontext) for lowering in case.lowerings]
    if case.torch_ops and "eager" in case.lowerings and has_implementations(key):
        ways.insert(0, ("eager, torch ops", "eager", lambda: plain_torch(key)))
    prepared: list[_Prepared] = []
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for name, lowering, ops in ways:
            row = {field: getattr(case, field) for field in ("shape", "requests", "k", "context")} | {"lowering": name}
            try:
                drafter = drafter_for(case, lowering, platform, head, attention, cached)
            except UnsupportedError as error:
                rows.append(row | {"refused": str(error)})
                continue
            with ops():
                prepared.append(_prepare(platform, case, drafter, batch, ops, row))
        for ready in in_turns(prepared, case.repeats):
            with ready.ops():
                ready.times["device_us"] += device_time(platform, ready.call, repeats=1, warmup=1)
                ready.times["host_us"] += host_time(platform, ready.call, repeats=1, warmup=0)
                ready.times["propose_device_us"] += device_time(platform, ready.propose, repeats=1, warmup=1)
                ready.times["propose_host_us"] += host_time(platform, ready.propose, repeats=1, warmup=0)
        floor: dict[str, float] = {}
        if rates is not None and case.tree is None:
            floor = propose_floor(head, case.requests, case.k, case.context, rates, cached)
        for ready in prepared:
            times = {name: statistics.median(each) for name, each in ready.times.items()}
            spread = {"device_us_least": min(ready.times["device_us"]), "device_us_most": max(ready.times["device_us"])}
            row = ready.row | {name: round(time, 1) for name, time in (times | spread).items()} | floor
            rows.append(row | ({"ratio": round(times["device_us"] / floor["floor_us"], 3)} if floor else {}))
            ready.drafter.close()
    return rows


@dataclass(slots=True)
class _Prepared:
    """A captured drafter with the batch in its buffers, and its times."""

    drafter: Drafter
    ops: Callable[[], AbstractContextManager[None]]
    """Returns the context of every call, which chooses the implementation of the ops."""
    call: Callable[[], Any]
    """Runs the draft loop over the batch in the buffers."""
    propose: Callable[[], Any]
    """Copies the batch in, runs the draft loop, and copies the draft tokens out."""
    row: dict[str, Any]
    times: dict[str, list[float]] = field(default_factory=lambda: defaultdict[str, list[float]](list))
    """The microseconds of every call, by the row's key for their median."""


def drafter_for(
    case: BenchCase,
    lowering: LoweringChoice,
    platform: Platform,
    head: RandomHead,
    attention: AttentionBackend,
    cached: torch.dtype | None = None,
) -> Drafter:
    """Return a drafter for this case, not yet captured. Its random KV has the dtype `cached` (None: the head's)."""
    config = DraftConfig(
        num_speculative_tokens=case.k,
        max_num_requests=case.requests,
        max_model_len=case.max_model_len,
        block_size=attention.preferred_block_size,
        capture_sizes=[case.requests],
        decode=lowering,
        sampled=case.sampled,
        tree=case.tree,
    )
    drafter = lone_drafter(platform, head, config, attention, cached)
    for cache in drafter.caches:
        for part in cache:
            part.copy_(torch.randn(part.shape, device=platform.device))
    return drafter


def _prepare(
    platform: Platform,
    case: BenchCase,
    drafter: Drafter,
    batch: ProposeBatch,
    ops: Callable[[], AbstractContextManager[None]],
    row: dict[str, Any],
) -> _Prepared:
    reserved, start = platform.memory().reserved, time.perf_counter()
    drafter.capture()
    platform.synchronize()
    row["capture_seconds"] = round(time.perf_counter() - start, 3)
    row["graph_memory_bytes"] = platform.memory().reserved - reserved
    inputs = drafter.inputs(case.requests)
    counts, starts = _host_numbers(case)

    def propose(num_sampled: list[int] | None = counts) -> Any:
        return drafter.propose(batch, host_start_positions=starts, host_num_sampled=num_sampled)

    def call() -> Any:
        return drafter.propose(inputs, host_start_positions=starts, host_num_sampled=counts, copy=False)

    propose()  # leaves the batch in the drafter's memory
    before = drafter.launches["propose"]
    call()
    row["launches"] = drafter.launches["propose"] - before
    # Without the counts, as in a host engine that does not wait for its verify.
    if issued := count_issued(platform, lambda: propose(num_sampled=None)):
        row["issued"] = issued
    return _Prepared(drafter, ops, call, propose, row)


def propose_batch(head: RandomHead, case: BenchCase, device: torch.device, block_size: int) -> ProposeBatch:
    """Return a batch of requests with `context` tokens each. Every other request has one accepted draft token."""
    n, q = case.requests, case.k + 1
    per_request = -(-case.max_model_len // block_size)
    counts, starts = _host_numbers(case)
    g = torch.Generator().manual_seed(0)
    vocab = SHAPES[case.shape].vocab_size
    return ProposeBatch(
        sampled_token_ids=torch.randint(0, vocab, (n, q), generator=g).to(device),
        num_sampled=torch.tensor(counts, dtype=torch.int32, device=device),
        start_positions=torch.tensor(starts, device=device),
        aux_hidden=torch.randn(n * q, head.aux_size, generator=g).to(device, head.dtype),
        block_table=(torch.randperm(n * per_request, generator=g) + 1).view(n, per_request).int().to(device),
        temperature=torch.ones(n, device=device) if case.sampled else None,
        seeds=torch.arange(n, device=device) if case.sampled else None,
    )


def _host_numbers(case: BenchCase) -> tuple[list[int], list[int]]:
    """Return `num_sampled` and `start_positions` of the batch, one number per request."""
    counts = [1 + r % 2 for r in range(case.requests)]
    return counts, [case.context - count for count in counts]
