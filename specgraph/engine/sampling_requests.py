"""Writing what requests ask of sampling where the graphs of target and drafter read it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specgraph.capture import write
from specgraph.draft import SamplingBuffers
from specgraph.engine.request import Running


def write_sampling(buffers: SamplingBuffers, states: Sequence[Running], first: int) -> None:
    """Write the parameters and the tokens so far of requests, for rows `first` on."""
    vocab, requests = buffers.bias.shape[1], [state.request for state in states]
    own = buffers.sliced(slice(first, first + len(states)))
    write(own.top_k, [request.top_k for request in requests])
    for name in ("top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        write(getattr(own, name), [getattr(request, name) for request in requests])
    bias = torch.zeros(len(states), vocab)
    counts = torch.zeros(len(states), vocab, dtype=torch.int32)
    prompt = torch.zeros(len(states), vocab, dtype=torch.bool)
    for row, (state, request) in enumerate(zip(states, requests, strict=True)):
        if request.logit_bias:
            bias[row, list(request.logit_bias)] = torch.tensor(list(request.logit_bias.values()))
        length = len(request.prompt_token_ids)
        prompt[row, list(request.prompt_token_ids)] = True
        counts[row] = torch.bincount(torch.tensor(state.token_ids[length:], dtype=torch.int64), minlength=vocab)
    for tensor, values in ((own.bias, bias), (own.output_counts, counts), (own.in_prompt, prompt)):
        tensor.copy_(values)
