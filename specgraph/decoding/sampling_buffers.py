"""What the requests of a batch ask of sampling besides temperature and seed, in the memory of the target's graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from specgraph import kernels
from specgraph.decoding.request import Running
from specgraph.runner import write


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBuffers:
    """Parameters and token counts of R requests; see `kernels.adjust_logits`."""

    top_k: Tensor
    """int64 [R]"""
    top_p: Tensor
    """float32 [R], as all that follow up to frequency_penalty."""
    min_p: Tensor
    repetition_penalty: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    bias: Tensor
    """float32 [R, vocab]"""
    output_counts: Tensor
    """int32 [R, vocab]: of the output without `new_token_ids`."""
    in_prompt: Tensor
    """bool [R, vocab]"""
    new_token_ids: Tensor
    """int64 [R, query_len]: what the last round sampled, filled up with -1; the next verify counts it."""

    def named_tensors(self) -> dict[str, Tensor]:
        """Every tensor by name, for the read-set."""
        return {f"sampling.{field.name}": getattr(self, field.name) for field in fields(self)}

    def adjusted(self, logits: Tensor, draft_token_ids: Tensor, temperature: Tensor, first: int = 0) -> Tensor:
        """`kernels.adjust_logits` for the requests from row `first` on, as many as there are temperatures."""
        rows = slice(first, first + temperature.shape[0])
        return kernels.adjust_logits(
            logits, draft_token_ids, temperature, self.top_k[rows], self.top_p[rows], self.min_p[rows],
            self.repetition_penalty[rows], self.presence_penalty[rows], self.frequency_penalty[rows], self.bias[rows],
            self.output_counts[rows], self.in_prompt[rows],
        )  # fmt: skip

    def write_requests(self, states: Sequence[Running], first: int) -> None:
        """Write the parameters and the tokens so far of requests, for rows `first` on."""
        rows, vocab = slice(first, first + len(states)), self.bias.shape[1]
        requests = [state.request for state in states]
        write(self.top_k[rows], [request.top_k for request in requests])
        for name in ("top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            write(getattr(self, name)[rows], [getattr(request, name) for request in requests])
        bias = torch.zeros(len(states), vocab)
        counts = torch.zeros(len(states), vocab, dtype=torch.int32)
        prompt = torch.zeros(len(states), vocab, dtype=torch.bool)
        for row, state in enumerate(states):
            request = state.request
            if request.logit_bias:
                bias[row, list(request.logit_bias)] = torch.tensor(list(request.logit_bias.values()))
            length = len(request.prompt_token_ids)
            prompt[row, list(request.prompt_token_ids)] = True
            counts[row] = torch.bincount(torch.tensor(state.token_ids[length:], dtype=torch.int64), minlength=vocab)
        for tensor, values in ((self.bias, bias), (self.output_counts, counts), (self.in_prompt, prompt)):
            tensor[rows].copy_(values)
        self.new_token_ids[rows].fill_(-1)

    def write_new_tokens(self, states: Sequence[Running]) -> None:
        """Write what the last round sampled, for the requests in rows 0 on."""
        width = self.new_token_ids.shape[1]
        new = [state.token_ids[len(state.token_ids) - state.num_sampled :] for state in states]
        write(self.new_token_ids[: len(states)], [[*ids, *[-1] * (width - len(ids))] for ids in new])


def allocate_sampling(requests: int, query_len: int, vocab_size: int, device: torch.device) -> SamplingBuffers:
    """Buffers for `requests` requests that ask for nothing."""

    def full(value: float, dtype: torch.dtype = torch.float32, columns: int | None = None) -> Tensor:
        shape = (requests,) if columns is None else (requests, columns)
        return torch.full(shape, value, dtype=dtype, device=device)

    return SamplingBuffers(
        top_k=full(0, torch.int64),
        top_p=full(1.0),
        min_p=full(0.0),
        repetition_penalty=full(1.0),
        presence_penalty=full(0.0),
        frequency_penalty=full(0.0),
        bias=full(0.0, columns=vocab_size),
        output_counts=full(0, torch.int32, vocab_size),
        in_prompt=full(0, torch.bool, vocab_size),
        new_token_ids=full(-1, torch.int64, query_len),
    )
