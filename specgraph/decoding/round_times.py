"""How long a round takes for each captured size and K, measured once after the capture (`-k auto`)."""

from __future__ import annotations

import statistics
import time

import torch

from specgraph.attention import NULL_BLOCK
from specgraph.decoding.adaptive_k import RoundTimes
from specgraph.decoding.config import EngineConfig
from specgraph.decoding.target import TargetRunner
from specgraph.drafting import Drafter

CONTEXT = 1024
"""Tokens of context that each request has while rounds are timed; half of max_model_len where that is less."""

_STRETCHES, _ROUNDS = 3, 4


def measure_round_times(target: TargetRunner, drafter: Drafter, config: EngineConfig) -> RoundTimes:
    """Run rounds of random tokens at every captured size and K, and time them by the host's clock.

    Target and drafter must be idle: the KV caches are written, and zeroed at the end.

    Returns:
        Microseconds of one round, the median of some stretches: {requests: {K: time}}.
    """
    times: dict[int, dict[int, float]] = {}
    for size in config.sizes:
        _make_live(target, config, size)
        times[size] = {
            shape.num_speculative_tokens: _time(target, drafter, config, size, shape.num_speculative_tokens)
            for shape in config.shapes_at(size)
        }
    memory = target.round
    memory.start_positions.fill_(-1)
    memory.num_sampled.zero_()
    memory.block_table.fill_(NULL_BLOCK)
    for cache in (*target.caches, *drafter.caches):
        cache.key.zero_()
        cache.value.zero_()
    return times


def _start(config: EngineConfig) -> int:
    return min(CONTEXT, config.max_model_len // 2)


def _make_live(target: TargetRunner, config: EngineConfig, size: int) -> None:
    """Give each of `size` requests blocks and a draft; requests share blocks where there are too few."""
    memory, program = target.round, target.verify_program
    blocks = target.caches[0].key.shape[0] - 1
    columns = min(-(-(_start(config) + 2 * config.query_len) // config.block_size), memory.block_table.shape[1])
    table = torch.arange(size * columns, dtype=torch.int32).view(size, columns) % blocks + 1
    memory.block_table[:size, :columns].copy_(table)
    b, g = program.sliced(size, config.query_len), torch.Generator().manual_seed(0)
    for tensor in (b.last_token_ids, b.draft_token_ids):
        tensor.copy_(torch.randint(0, target.target.vocab_size, tuple(tensor.shape), generator=g))


def _time(target: TargetRunner, drafter: Drafter, config: EngineConfig, size: int, k: int) -> float:
    starts, platform = [_start(config)] * size, target.platform
    batch = drafter.inputs(size, k + 1)

    def counts() -> list[int]:
        return batch.num_sampled.tolist()

    def rounds(number: int) -> None:
        for _ in range(number):
            target.verify(size, starts, k + 1)
            drafter.propose(
                batch, host_start_positions=starts, host_num_sampled=counts, num_speculative_tokens=k, copy=False
            )
        platform.synchronize()

    rounds(2)
    seconds: list[float] = []
    for _ in range(_STRETCHES):
        begin = time.perf_counter()
        rounds(_ROUNDS)
        seconds.append((time.perf_counter() - begin) / _ROUNDS)
    return statistics.median(seconds) * 1e6
