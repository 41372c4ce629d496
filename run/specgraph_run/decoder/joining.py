"""Joining the rounds: prefill a request's prompt, draw its first token, and write its row."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specgraph.attention import NULL_BLOCK
from specgraph.capture import write
from specgraph.draft import Drafter
from specgraph.ops import noise
from specgraph_run.decoder import ops as decoder_ops
from specgraph_run.decoder.request import NUMBERS, Request, Running
from specgraph_run.decoder.sampling_buffers import SamplingBuffers
from specgraph_run.decoder.target import TargetRunner
from specgraph_run.decoder.verify_buffers import logprobs_of


def prefill_prompt(
    target: TargetRunner, drafter: Drafter | None, state: Running, at_least: int, passed: Callable[[], None]
) -> range:
    """Compute target and drafter KV of a prompt, one prefill chunk after the other.

    Afterwards `TargetRunner.prompt_logits` has the logits of the last token. `DraftPrefill.buffers` has its hidden
    state, in the row that the token had in the last prefill chunk.

    Args:
        at_least: the least number of rows that each pass is padded to.
        passed: called after each pass, the target's and the drafter's in turns.

    Returns:
        The position that each pass of the target began at.
    """
    prompt, length = state.token_ids, target.config.prefill_rows[-1]
    starts = range(0, len(prompt), length)
    for start in starts:
        chunk = prompt[start : start + length]
        target.prefill(chunk, start, state.blocks, at_least)
        passed()
        if drafter is not None:
            positions = range(start, start + len(chunk))
            drafter.prefill(prompt, positions, state.blocks, at_least=at_least)
            passed()
    return starts


def join_round(
    target: TargetRunner,
    drafter: Drafter | None,
    state: Running,
    query_len: int,
    at_least: int,
    passed: Callable[[], None],
) -> None:
    """Prefill a request and write its row. In the next round it looks like a request that sampled one token.

    Args:
        query_len: rows per request in the last round.
        at_least, passed: see `prefill_prompt`.
    """
    prompt, request, row = state.token_ids, state.request, slice(state.row, state.row + 1)
    starts = prefill_prompt(target, drafter, state, at_least, passed)
    batch = target.shared.sliced(row.stop, query_len)
    _write_row(target, state)
    adjusted = logits = target.prompt_logits

    def number(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((1,), value, dtype=dtype, device=logits.device)

    temperature = number(request.temperature, torch.float32)
    sampling = target.sampling
    if sampling is not None:
        sampling = sampling.sliced(row)
        _write_sampling(sampling, request)
        no_drafts = temperature.new_zeros((1, 0), dtype=torch.int64)
        adjusted = decoder_ops.adjust_logits(logits, temperature, sampling, no_drafts)
    token = adjusted.argmax(-1)
    if request.temperature:
        at = number(len(prompt), torch.int64)
        token = first_token(adjusted, temperature, number(state.seed, torch.int64), at)
    if sampling is not None:
        decoder_ops.count_tokens(token[None], sampling.output_counts)
    hidden = None if drafter is None else drafter.prefill_buffers.aux_hidden[len(prompt) - 1 - starts[-1]]
    batch.join(state.row, token[0], hidden)
    logprobs = logprobs_of(target.shared, *batch.sampled_token_ids.shape)
    if logprobs is not None:
        decoder_ops.emitted_logprobs(logits, token[None], logprobs[row, :1])


def first_token(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw the token after a prompt, int64 [1], from softmax(logits [1, vocab] / temperature).

    There is no draft to verify. The noise is the noise that a verify would resample `positions`, int64 [1], with.
    """
    hot = temperature > 0
    scaled = logits.float() / torch.where(hot, temperature, 1.0)[:, None]
    drawn = scaled + noise.gumbel(seeds, positions, noise.RESAMPLE, logits.shape[-1])
    return torch.where(hot, drawn.argmax(-1), logits.argmax(-1))


def _write_row(target: TargetRunner, state: Running) -> None:
    """Upload the host's values of a request: KV blocks, position, temperature and seed. The drafter reads them too."""
    memory, config = target.shared, target.config
    row, width = slice(state.row, state.row + 1), memory.block_table.shape[1]
    write(memory.block_table[row], [*state.blocks, *[NULL_BLOCK] * (width - len(state.blocks))])
    write(memory.start_positions[row], [state.position])
    if config.sampled:
        write(memory.temperature[row], [state.request.temperature])
    if config.sampled or target.options.synthetic_acceptance is not None:
        write(memory.seeds[row], [state.seed])


def _write_sampling(row: SamplingBuffers, request: Request) -> None:
    """Write a request's sampling parameters and its prompt tokens into its row."""
    for name in NUMBERS:
        write(getattr(row, name), [getattr(request, name)])
    bias, in_prompt = torch.zeros(row.bias.shape), torch.zeros(row.in_prompt.shape, dtype=torch.bool)
    if request.logit_bias:
        bias[0, list(request.logit_bias)] = torch.tensor(list(request.logit_bias.values()))
    in_prompt[0, list(request.prompt_token_ids)] = True
    row.bias.copy_(bias)
    row.in_prompt.copy_(in_prompt)
    row.output_counts.zero_()
