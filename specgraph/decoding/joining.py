"""What a request needs before it takes part in rounds: its prompt's KV, its first token, and its row's inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specgraph import kernels
from specgraph.attention import NULL_BLOCK
from specgraph.decoding.config import EngineConfig
from specgraph.decoding.request import Running
from specgraph.decoding.sampling_requests import write_sampling
from specgraph.decoding.target import TargetRunner, sample_token
from specgraph.drafting import Drafter, ProposeBatch, RoundBuffers
from specgraph.runner import write


def write_requests(memory: RoundBuffers, config: EngineConfig, states: Sequence[Running], first: int) -> None:
    """Upload what belongs to a request and not to a round, for rows `first` on: block tables, temperatures, seeds.

    Target and drafter both read it.
    """
    rows, width = slice(first, first + len(states)), memory.block_table.shape[1]
    write(memory.block_table[rows], [[*s.blocks, *[NULL_BLOCK] * (width - len(s.blocks))] for s in states])
    if config.sampled:
        write(memory.temperature[rows], [s.request.temperature for s in states])
        write(memory.seeds[rows], [s.request.seed for s in states])
    elif config.synthetic_acceptance is not None:  # requests of one seed must not all accept alike
        write(memory.seeds[rows], [(s.request.seed + s.index) % 2**63 for s in states])


def chunk_rows(config: EngineConfig) -> int:
    """Tokens of a prompt in one prefill pass, at most."""
    return min(config.prefill_chunk or config.prefill_rows[-1], config.prefill_rows[-1])


def prefill_request(
    target: TargetRunner,
    drafter: Drafter | None,
    state: Running,
    memory: ProposeBatch,
    row: int,
    at_least: int = 0,
) -> int:
    """Target and drafter KV of a prompt, chunk by chunk, and the first token, as a round that sampled one token.

    Args:
        memory: of the round that the request joins.
        row: the request's there.
        at_least: rows that each pass is padded for at least.

    Returns:
        Passes of the target that were run.
    """
    prompt, request = state.token_ids, state.request
    length = chunk_rows(target.config)
    starts = range(0, len(prompt), length)
    logits = hidden = None
    for start in starts:
        chunk = prompt[start : start + length]
        logits = target.prefill(chunk, start, state.blocks, at_least)
        if drafter is not None:
            positions = range(start, start + len(chunk))
            hidden = drafter.prefill(prompt, positions, state.blocks, at_least=at_least)
    assert logits is not None
    program, adjusted = target.verify_program, logits
    own = None if program.sampling is None else program.sampling.sliced(slice(row, row + 1))
    if own is not None and program.sampling is not None:
        write_sampling(program.sampling, [state], row)
        temperature = torch.full((1,), request.temperature, device=logits.device)
        no_drafts = torch.zeros(1, 0, dtype=torch.int64, device=logits.device)
        adjusted = own.adjusted(logits[None], no_drafts, temperature)[0]
    token = sample_token(adjusted, request.temperature, request.seed, len(prompt))
    if own is not None:
        kernels.count_tokens(token.view(1, 1), own.output_counts)
    memory.join(row, token, hidden)
    logprobs = program.logprobs(*memory.sampled_token_ids.shape)
    if logprobs is not None:
        kernels.emitted_logprobs(logits[None], token.view(1, 1), logprobs[row : row + 1, :1])
    return len(starts)
