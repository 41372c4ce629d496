"""Sampling parameters besides temperature and seed, in the memory that the graphs of target and drafter read."""

from __future__ import annotations

import torch
from torch import Tensor

from specgraph.draft import LogitsAdjustment
from specgraph.errors import ConfigError, first_line
from specgraph.ops.tensor_forms import check_forms
from specgraph.validation import Requests, Tokens, checked
from specgraph_run.decoder import ops as decoder_ops
from specgraph_run.decoder.ops.sampling_parameters import SamplingParameters

_FORMS = {
    "top_k": "int64 [R]",
    "top_p": "float32 [R]",
    "min_p": "float32 [R]",
    "repetition_penalty": "float32 [R]",
    "presence_penalty": "float32 [R]",
    "frequency_penalty": "float32 [R]",
    "bias": "float32 [R, vocab]",
    "output_counts": "int32 [R, vocab]",
    "in_prompt": "bool [R, vocab]",
}


_ADJUSTED = {
    "logits": "floats [rows, draft_vocab]",
    "draft_to_target": "int64 [draft_vocab] or None",
    "temperature": "float32 [R]",
    "drafted": "int64 [R, K] or None",
    "top_k": "int64 [R]",
}


class SamplingBuffers(SamplingParameters, LogitsAdjustment):
    """Sampling parameters and token counts of R requests; see `adjust_logits`.

    Raises:
        ConfigError: a tensor has another dtype, shape or device than its field says.
    """

    __slots__ = ()

    def __new__(cls, *args: Tensor, **fields: Tensor) -> SamplingBuffers:
        try:
            made = super().__new__(cls, *args, **fields)
        except TypeError as error:
            raise ConfigError(f"SamplingBuffers: it takes {', '.join(_FORMS)}; {first_line(error)}") from None
        check_forms("SamplingBuffers", made._asdict(), _FORMS, written=True)
        return made

    @checked
    def check(self, requests: int, vocab_size: int | None, device: torch.device) -> None:
        """Raise ConfigError if the buffers are for fewer than `requests`, another vocabulary or another device.

        vocab_size: of the target. None if it is not known; it is then not compared.
        """
        rows, columns = self.bias.shape
        if self.bias.device.type != device.type:
            raise ConfigError(f"sampling is on {self.bias.device}: allocate it on the drafter's device, {device}")
        if rows < requests or (vocab_size is not None and columns != vocab_size):
            wanted = f"{requests} requests" + ("" if vocab_size is None else f" and {vocab_size} tokens")
            raise ConfigError(
                f"sampling is for {rows} requests and {columns} tokens, the drafter's batches have {wanted}: call "
                "allocate_sampling(max_num_requests, vocab_size, device) with the target's vocabulary"
            )

    def views(self, num_requests: int, **sizes: int) -> SamplingBuffers:
        return self._make(tensor[:num_requests] for tensor in self)

    @checked
    def sliced(self, rows: slice) -> SamplingBuffers:
        """Return views of the parameters of some requests."""
        return SamplingBuffers(*(tensor[rows] for tensor in self))

    def adjusted_drafts(
        self, logits: Tensor, draft_to_target: Tensor | None, temperature: Tensor, drafted: Tensor | None = None
    ) -> Tensor:
        """Adjust the drafter's logits as `adjust_logits` does the target's, so that fewer drafts are rejected.

        Args:
            logits: [R * n, draft_vocab]: n rows per request, all with the same context.
            draft_to_target: as in `ops.Drafts`.
            drafted: int64 [R, K]: draft tokens that count as tokens of the output. -1 stands for no token.
        """
        given = {"logits": logits, "draft_to_target": draft_to_target, "temperature": temperature, "drafted": drafted}
        check_forms("adjusted_drafts", given | self._asdict(), _ADJUSTED)
        requests = temperature.shape[0]
        if drafted is None:
            drafted = self.top_k.new_empty((requests, 0))
        everywhere = self.top_k.new_full((logits.shape[0],), -1)  # all bits set: every row has all drafts
        return decoder_ops.adjust_logits(logits, temperature, self, drafted, everywhere, draft_to_target)


@checked
def allocate_sampling(requests: Requests, vocab_size: Tokens, device: torch.device) -> SamplingBuffers:
    """Allocate buffers for `requests` requests, with values that change no logits. vocab_size: of the target."""

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
    )
