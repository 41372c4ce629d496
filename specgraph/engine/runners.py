"""The model runners of a decoder, with their KV caches: target, drafter, and whole rounds in one launch."""

from __future__ import annotations

from dataclasses import dataclass

from specgraph.attention import AttentionBackend, KVCache
from specgraph.capture import ModelRunner
from specgraph.device import Platform
from specgraph.draft import Drafter, allocate_sampling
from specgraph.engine.blocks import allocate_caches, cache_dtype
from specgraph.engine.config import EngineConfig
from specgraph.engine.round_program import RoundRunner
from specgraph.engine.target import TargetRunner
from specgraph.models.protocol import DraftHead, ParallelHead, Target


@dataclass(frozen=True, slots=True)
class Runners:
    """What holds the captured graphs of one decoder."""

    target: TargetRunner
    drafter: Drafter | None
    whole: RoundRunner | None
    """Runs rounds in one launch; None in every lowering but `round`."""

    def by_name(self) -> dict[str, ModelRunner]:
        """Those that there are, in the order in which they capture."""
        named = {"target": self.target, "drafter": self.drafter, "round": self.whole}
        return {name: runner for name, runner in named.items() if runner is not None}


def make_runners(
    target: Target,
    head: DraftHead | ParallelHead | None,
    platform: Platform,
    config: EngineConfig,
    *,
    query_len: int,
    num_blocks: int,
    attention: AttentionBackend,
) -> Runners:
    """Allocate the KV caches and all other memory, and make the runners over it; nothing is captured yet.

    Args:
        query_len: rows per request in a target pass without a drafter.
        num_blocks: of each KV cache, the null block included.
        attention: for target and drafter.

    Raises:
        CapacityError: the device has not enough memory.
        UnsupportedError: the lowering that was asked for is not possible on this platform.
    """

    def caches(model: Target | DraftHead | ParallelHead) -> list[KVCache]:
        dtype = cache_dtype(config.kv_cache_dtype, model.dtype)
        return allocate_caches(model.attention_layers, num_blocks, config.block_size, dtype, platform.device)

    asked = None
    if config.sampling_parameters:
        asked = allocate_sampling(config.max_num_requests, target.vocab_size, platform.device)
    drafter = None
    if head is not None:
        drafter = Drafter(head, caches(head), platform, config, attention=attention, sampling=asked)
    runner = TargetRunner(
        target,
        caches(target),
        platform,
        config,
        attention=attention,
        query_lens=(query_len,) if head is None else config.query_lens,
        drafter=drafter,
        sampling=asked,
    )
    whole = RoundRunner(runner, drafter, config) if drafter is not None and config.decode == "round" else None
    return Runners(runner, drafter, whole)
