"""Which draft program a head runs, and which KV caches it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from specgraph.attention import KVCache
from specgraph.capture import AttentionStack
from specgraph.draft.chain import ChainProgram
from specgraph.draft.config import DraftConfig
from specgraph.draft.masked import MaskedProgram
from specgraph.draft.parallel import ParallelProgram
from specgraph.draft.program import DraftProgram
from specgraph.draft.round import RoundBuffers
from specgraph.draft.stepwise import StepwiseProgram
from specgraph.draft.tree import TreeProgram
from specgraph.errors import ConfigError, UnsupportedError
from specgraph.models.protocol import DraftHead, MaskedHead, ParallelHead, StepwiseHead


def programs_for(
    head: DraftHead | ParallelHead,
    stack: AttentionStack,
    config: DraftConfig,
    memory: RoundBuffers,
    position_offset: int,
) -> list[DraftProgram[Any]]:
    """The draft programs of a head: of chains, of trees, or both where the schedule drafts both.

    Args:
        memory: what the target's rounds leave; the programs share it.

    Raises:
        ConfigError: the head cannot draft K tokens.
        UnsupportedError: the head cannot draft trees.
    """
    k, tree = config.num_speculative_tokens, config.tree
    shapes = [None] * bool(config.chain_lens) + [tree] * (tree is not None)
    if head.kind == "parallel":
        head = cast(ParallelHead, head)
        if k > head.max_speculative_tokens:
            raise ConfigError(
                f"num_speculative_tokens is {k}, and this parallel drafter was trained to fill "
                f"{head.max_speculative_tokens} masked positions; ask for at most that many"
            )
        return [ParallelProgram(head, stack, config, memory, shape) for shape in shapes]
    if head.kind == "masked":
        return [MaskedProgram(cast(MaskedHead, head), stack, config, memory, shape) for shape in shapes]
    if head.kind == "modules":
        head = cast(StepwiseHead, head)
        if tree is not None:
            raise UnsupportedError(
                f"the drafter has {head.num_modules} modules, one per draft token, and draft trees need one that is "
                "used at every step: load it with num_modules=1 (--num-modules 1)"
            )
        if k > head.num_modules:
            raise ConfigError(
                f"num_speculative_tokens is {k}, and the drafter has {head.num_modules} modules, one per draft token; "
                "ask for fewer tokens, or load it with num_modules=1 (--num-modules 1) to reuse the first module "
                "at every step"
            )
        return [StepwiseProgram(head, stack, config, memory)]
    head, programs = cast(DraftHead, head), list[DraftProgram[Any]]()
    if config.chain_lens:
        programs.append(ChainProgram(head, stack, config, memory, position_offset))
    if tree is not None:
        programs.append(TreeProgram(head, stack, config, tree, memory, position_offset))
    return programs


def check_caches(
    head: DraftHead | ParallelHead, caches: Sequence[KVCache], config: DraftConfig, device: torch.device
) -> None:
    """Refuse KV caches that do not fit the head, the config or the platform's device.

    Raises:
        ConfigError: their number, shapes or device, or the head has too few positions.
    """
    if len(caches) != len(head.attention_layers):
        raise ConfigError(
            f"the drafter has {len(head.attention_layers)} attention layer(s), got {len(caches)} KV caches"
        )
    for index, (layer, cache) in enumerate(zip(head.attention_layers, caches, strict=True)):
        if not (hasattr(cache, "key") and hasattr(cache, "value")):
            raise ConfigError(f"caches[{index}] is a {type(cache).__name__}; give a specgraph.KVCache(key, value)")
        if layer.rotary is not None and layer.rotary.shape[0] < config.max_model_len:
            raise ConfigError(
                f"max_model_len is {config.max_model_len}, and the drafter was loaded for {layer.rotary.shape[0]} "
                "positions (its target's max_model_len)"
            )
        wanted = (config.block_size, layer.num_kv_heads, layer.head_dim)
        for name, tensor in (("key", cache.key), ("value", cache.value)):
            if tuple(tensor.shape[1:]) != wanted:
                raise ConfigError(
                    f"the drafter's {name} cache is {list(tensor.shape)}; needed is [num_blocks, block_size, "
                    f"num_kv_heads, head_dim] = [*, {', '.join(map(str, wanted))}]"
                )
            if tensor.device.type != device.type:
                raise ConfigError(
                    f"the drafter's {name} cache is on {tensor.device}; allocate it on the platform's device, {device}"
                )
