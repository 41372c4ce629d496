"""Admission of requests: checks before anything is queued, the KV blocks that they need, and who may join."""

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
    """Refuse what can never run: a CapacityError for a prompt, or KV that it may need, that is too long for
    `num_blocks`; a ConfigError for sampling or its parameters where this decoder has none, and for tokens outside of
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
    """Return the KV blocks for all that the request can ever touch, so that it never runs out midway."""
    reach = len(request.prompt_token_ids) + request.max_tokens + 2 * query_len
    return -(-(min(reach, config.max_model_len) + config.scratch_tokens) // config.block_size)


def admissible(
    waiting: Iterable[Running], config: DraftConfig, query_len: int, num_rows: int, num_blocks: int
) -> list[Running]:
    """Return the requests that may join, in order, by the free rows and KV blocks; none overtakes one that does not
    fit.
    """
    joining: list[Running] = []
    for state in waiting:
        num_blocks -= blocks_needed(state.request, config, query_len)
        if num_blocks < 0 or len(joining) == num_rows:
            break
        joining.append(state)
    return joining
