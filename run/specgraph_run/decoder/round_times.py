"""Times of rounds for each captured size and K, measured once after the capture, for `-k auto`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from specgraph_models.ops.delta import NULL_STATE

from specgraph.attention import NULL_BLOCK
from specgraph.config import DraftConfig
from specgraph.device import Platform
from specgraph.draft import Drafter
from specgraph_run.decoder.round_stages import HostState, RoundStages
from specgraph_run.decoder.target import TargetRunner
from specgraph_run.options import RoundTimes

CONTEXT = 1024
"""Tokens of context of each request while rounds are timed. Half of max_model_len if that is less, or fewer if the
timed rounds would not fit behind them."""

_STRETCHES, _ROUNDS = 3, 4


def measure_round_times(stages: RoundStages, drafter: Drafter) -> RoundTimes:
    """Run rounds of random tokens at every captured size and K, and time them by the host's clock.

    Target and drafter must be idle: the KV caches are overwritten, and zeroed at the end.

    Returns:
        Median microseconds of one round: {requests: {K: time}}.
    """
    times: dict[int, dict[int, float]] = {}
    target = stages.target
    for size in target.config.sizes:
        times[size] = {}
        for k in target.config.k_candidates or ():
            _make_live(target, size)
            times[size][k] = _time(target.platform, _rounds(stages, size, k))
    memory = target.shared
    memory.start_positions.fill_(-1)
    memory.num_sampled.zero_()
    memory.block_table.fill_(NULL_BLOCK)
    if target.states is not None:
        target.states.slot_of_block.fill_(NULL_STATE)
    for cache in (*target.caches, *drafter.caches):
        cache.key.zero_()
        cache.value.zero_()
    return times


def _start(config: DraftConfig) -> int:
    behind = config.max_model_len - _ROUNDS * config.query_len - 1
    return max(0, min(CONTEXT, config.max_model_len // 2, behind))


def _make_live(target: TargetRunner, size: int) -> None:
    """Give each of `size` requests KV blocks and random sampled tokens. Requests share blocks if there are too few."""
    memory, config = target.shared, target.config
    blocks = target.caches[0].key.shape[0] - 1
    tokens = _start(config) + (_ROUNDS + 1) * config.query_len
    columns = min(-(-tokens // config.block_size), memory.block_table.shape[1])
    table = torch.arange(size * columns, dtype=torch.int32).view(size, columns) % blocks + 1
    memory.block_table[:size, :columns].copy_(table)
    if (states := target.states) is not None:
        for row, first in enumerate(table[:, 0].tolist()):
            states.take(first, row + 1)
    sampled, g = memory.sampled_token_ids, torch.Generator().manual_seed(0)
    sampled.copy_(torch.randint(0, target.model.vocab_size, tuple(sampled.shape), generator=g))


def _rounds(stages: RoundStages, size: int, k: int) -> Callable[[], None]:
    """Return a function that launches rounds, for requests that have just sampled one token."""
    memory, ready = stages.target.shared, stages.find(size, k + 1, k)

    def run() -> None:
        memory.num_sampled[:size].fill_(1)
        memory.sampled_token_ids.clamp_(min=0)  # an inert request left -1
        memory.start_positions[:size].fill_(_start(stages.target.config))
        if stages.target.states is not None:
            stages.target.states.covered.fill_(_start(stages.target.config))
        for _ in range(_ROUNDS):
            host = None
            if stages.target.attention.host_parameters:
                host = HostState(memory.start_positions[:size].tolist(), memory.num_sampled[:size].tolist())
            for stage in ready.stages:
                stage(host)

    return run


def _time(platform: Platform, run: Callable[[], None]) -> float:
    """Return the median microseconds of a round: `run` launches `_ROUNDS` rounds and is timed `_STRETCHES` times."""
    run()
    platform.synchronize()
    seconds: list[float] = []
    for _ in range(_STRETCHES):
        begin = time.perf_counter()
        run()
        platform.synchronize()
        seconds.append((time.perf_counter() - begin) / _ROUNDS)
    return statistics.median(seconds) * 1e6
