"""Admission of requests: the checks before a request is queued, its KV blocks, and the requests that may join."""

from __future__ import annotations

from collections.abc import Iterable

from specgraph.config import DraftConfig
from specgraph.errors import CapacityError, ConfigError
from specgraph_run.decoder.request import Request, Running
from specgraph_run.options import DecoderOptions


def check_request(
    request: Request,
    config: DraftConfig,
    options: DecoderOptions,
    query_len: int,
    vocab_size: int,
    num_blocks: int,
) -> None:
    """Refuse a request that this decoder can never run.

    Raises:
        CapacityError: the prompt leaves no room below `max_model_len`, or the request may need more than `num_blocks`.
        ConfigError: the request wants sampling or sampling parameters, and the decoder has none; or a token is not in
            the target's vocabulary.
    """
    if not 0 <= min(request.prompt_token_ids) <= max(request.prompt_token_ids) < vocab_size:
        wrong = next(token for token in request.prompt_token_ids if not 0 <= token < vocab_size)
        raise ConfigError(f"prompt token {wrong} is not in the target's vocabulary of {vocab_size}")
    if request.temperature > 0 and not config.sampled:
        raise ConfigError(f"temperature {request.temperature}: this decoder is greedy; load it with sampled=True")
    if (parameters := request.parameters) and not options.sampling_parameters:
        name, value = next(iter(parameters.items()))
        raise ConfigError(
            f"{name} {value}: this decoder takes no such parameters; load it with sampling_parameters=True"
        )
    if wrong := [token for token in request.logit_bias if not 0 <= token < vocab_size]:
        raise ConfigError(f"logit_bias names token {wrong[0]}, the target's vocabulary has {vocab_size}")
    length = len(request.prompt_token_ids)
    if length >= config.max_model_len:
        raise CapacityError(
            f"the prompt has {length} tokens; with max_model_len {config.max_model_len} it may have "
            f"{config.max_model_len - 1}"
        )
    needed = blocks_needed(request, config, query_len)
    if needed > num_blocks:
        raise CapacityError(
            f"the request may need {needed} KV blocks of {config.block_size} tokens and the cache has "
            f"{num_blocks}: give the cache more blocks, or ask for fewer tokens"
        )


def blocks_needed(request: Request, config: DraftConfig, query_len: int) -> int:
    """Return the KV blocks that the request can ever touch. It owns them all when it joins, so it never runs out."""
    reach = len(request.prompt_token_ids) + request.max_tokens + 2 * query_len
    return -(-(min(reach, config.max_model_len) + config.scratch_tokens) // config.block_size)


def admissible(
    waiting: Iterable[Running], config: DraftConfig, query_len: int, num_rows: int, num_blocks: int
) -> list[Running]:
    """Return the waiting requests that fit into the free rows and KV blocks, in order. The first one that does not fit
    holds back all behind it.
    """
    joining: list[Running] = []
    for state in waiting:
        num_blocks -= blocks_needed(state.request, config, query_len)
        if num_blocks < 0 or len(joining) == num_rows:
            break
        joining.append(state)
    return joining
