"""How long a round takes for each captured size and K, measured once after the capture (`-k auto`)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from specgraph.attention import NULL_BLOCK
from specgraph.device import Platform
from specgraph.draft import Drafter
from specgraph.engine.adaptive_k import RoundTimes
from specgraph.engine.config import EngineConfig
from specgraph.engine.round_program import RoundRunner
from specgraph.engine.target import TargetRunner

CONTEXT = 1024
"""Tokens of context that each request has while rounds are timed; half of max_model_len where that is less, or as much
as leaves room for the timed rounds."""

_STRETCHES, _ROUNDS = 3, 4


def measure_round_times(
    target: TargetRunner, drafter: Drafter, config: EngineConfig, whole: RoundRunner | None = None
) -> RoundTimes:
    """Run rounds of random tokens at every captured size and K, and time them by the host's clock.

    Target and drafter must be idle: the KV caches are written, and zeroed at the end.

    Args:
        whole: launches rounds as one (lowering `round`).

    Returns:
        Microseconds of one round, the median of some stretches: {requests: {K: time}}.
    """
    times: dict[int, dict[int, float]] = {}
    for size in config.sizes:
        times[size] = {}
        for k, _ in config.shapes_at(size):
            _make_live(target, config, size)
            if whole is None:
                run, count = _two_passes(target, drafter, config, size, k), lambda: drafter.num_proposes
            else:
                run, count = _launched(whole, target, size, k), partial(_rounds_launched, whole)
            times[size][k] = _time(target.platform, run, count)
    memory = target.round
    memory.start_positions.fill_(-1)
    memory.num_sampled.zero_()
    memory.block_table.fill_(NULL_BLOCK)
    if whole is not None:
        whole.forget_rounds()
    for cache in (*target.caches, *drafter.caches):
        cache.key.zero_()
        cache.value.zero_()
    return times


def _start(config: EngineConfig) -> int:
    behind = config.max_model_len - _ROUNDS * config.query_len - 1
    return max(0, min(CONTEXT, config.max_model_len // 2, behind))


def _make_live(target: TargetRunner, config: EngineConfig, size: int) -> None:
    """Give each of `size` requests blocks, a draft and sampled tokens; they share blocks where there are too few."""
    memory, program = target.round, target.verify_program
    blocks = target.caches[0].key.shape[0] - 1
    tokens = _start(config) + (_ROUNDS + 1) * config.query_len
    columns = min(-(-tokens // config.block_size), memory.block_table.shape[1])
    table = torch.arange(size * columns, dtype=torch.int32).view(size, columns) % blocks + 1
    memory.block_table[:size, :columns].copy_(table)
    b, g = program.sliced(size, config.query_len), torch.Generator().manual_seed(0)
    for tensor in (b.last_token_ids, b.draft_token_ids, memory.sampled_token_ids):
        tensor.copy_(torch.randint(0, target.model.vocab_size, tuple(tensor.shape), generator=g))


def _two_passes(target: TargetRunner, drafter: Drafter, config: EngineConfig, size: int, k: int) -> Callable[[], None]:
    """Runs rounds of a verify and a propose each."""
    starts = [_start(config)] * size
    batch = drafter.inputs(size, k + 1)

    def counts() -> list[int]:
        return batch.num_sampled.tolist()

    def run() -> None:
        for _ in range(_ROUNDS):
            target.verify(size, starts, k + 1)
            drafter.propose(
                batch, host_start_positions=starts, host_num_sampled=counts, num_speculative_tokens=k, copy=False
            )

    return run


def _launched(whole: RoundRunner, target: TargetRunner, size: int, k: int) -> Callable[[], None]:
    """Launches rounds, for requests that have just sampled one token."""
    memory, found = target.round, whole.dispatch(size, k + 1, k)

    def run() -> None:
        memory.num_sampled[:size].fill_(1)
        memory.sampled_token_ids.clamp_(min=0)  # -1 where a request was inert
        memory.start_positions[:size].fill_(_start(whole.config))
        whole.state.remaining[:size].fill_(whole.config.max_model_len - _start(whole.config) - 1)
        for _ in range(_ROUNDS):
            if whole.attention.host_parameters:
                whole.launch(found, memory.start_positions[:size].tolist(), memory.num_sampled[:size].tolist())
            else:
                whole.launch(found)

    return run


def _rounds_launched(whole: RoundRunner) -> int:
    return int(whole.outputs.progress[0])


def _time(platform: Platform, run: Callable[[], None], num_rounds: Callable[[], int]) -> float:
    """Median microseconds of a round, over stretches of some rounds.

    Args:
        num_rounds: rounds that ran so far.
    """
    run()
    platform.synchronize()
    seconds: list[float] = []
    for _ in range(_STRETCHES):
        before, begin = num_rounds(), time.perf_counter()
        run()
        platform.synchronize()
        seconds.append((time.perf_counter() - begin) / (num_rounds() - before))
    return statistics.median(seconds) * 1e6
