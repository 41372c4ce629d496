"""What a head asks for: the program that drafts with it, told from what it offers, and KV caches that fit it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from specgraph.attention import KVCache
from specgraph.drafting.chain import ChainProgram
from specgraph.drafting.config import DraftConfig
from specgraph.drafting.parallel import ParallelProgram
from specgraph.drafting.program import DraftProgram
from specgraph.drafting.stepwise import ModuleHead, StepwiseProgram
from specgraph.errors import ConfigError
from specgraph.graphs import AttentionStack
from specgraph.models.protocol import DraftHead, OffsetHead, ParallelHead


def choose_program(head: DraftHead | ParallelHead, stack: AttentionStack, config: DraftConfig) -> DraftProgram:
    """The program for `head`.

    Raises:
        ConfigError: K is more than the head's modules, or than a parallel head was trained for.
    """
    k = config.num_speculative_tokens
    # Asked of attributes, not of the type: a wrapper that hands them through must not hide what it wraps.
    if hasattr(head, "store_context"):
        head = cast(ParallelHead, head)
        if k > head.max_speculative_tokens:
            raise ConfigError(
                f"num_speculative_tokens is {k}, and this parallel drafter was trained to fill "
                f"{head.max_speculative_tokens} masked positions; ask for at most that many"
            )
        return ParallelProgram(head, stack, config)
    head = cast(DraftHead, head)
    num_modules: int = getattr(head, "num_modules", 1)
    if num_modules > 1:
        if k > num_modules:
            raise ConfigError(
                f"num_speculative_tokens is {k}, and the drafter has {num_modules} modules, one a draft token; "
                "ask for fewer tokens, or load it with num_modules=1 (--num-modules 1) to reuse the first module at "
                "every step"
            )
        return StepwiseProgram(cast(ModuleHead, head), config)
    return ChainProgram(head, stack.backend, config, position_offset(head))


def position_offset(head: DraftHead | ParallelHead) -> int:
    """How much further than the target's the head's rows stand; also how many tokens earlier its prompts begin."""
    return head.position_offset if isinstance(head, OffsetHead) else 0


def check_caches(head: DraftHead | ParallelHead, caches: Sequence[KVCache], config: DraftConfig) -> None:
    """
    Raises:
        ConfigError: the caches don't fit the head's attention layers or the block size.
    """
    if len(caches) != len(head.attention_layers):
        raise ConfigError(
            f"the drafter has {len(head.attention_layers)} attention layer(s), got {len(caches)} KV caches"
        )
    for layer, cache in zip(head.attention_layers, caches, strict=True):
        wanted = (config.block_size, layer.num_kv_heads, layer.head_dim)
        for name, tensor in (("key", cache.key), ("value", cache.value)):
            if tuple(tensor.shape[1:]) != wanted:
                raise ConfigError(
                    f"the drafter's {name} cache is {list(tensor.shape)}; needed is [num_blocks, block_size, "
                    f"num_kv_heads, head_dim] = [*, {', '.join(map(str, wanted))}]"
                )
