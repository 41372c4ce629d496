"""Parameters of sampling besides temperature and seed, as the graphs of target and drafter read them."""

from __future__ import annotations

import torch
from torch import Tensor

from specgraph import ops
from specgraph.errors import ConfigError
from specgraph.validation import Requests, Tokens, checked


class SamplingBuffers(ops.SamplingParameters):
    """Parameters and token counts of R requests; see `ops.adjust_logits`."""

    __slots__ = ()

    def named_tensors(self) -> dict[str, Tensor]:
        return {f"sampling.{name}": tensor for name, tensor in self._asdict().items()}

    def check(self, requests: int, vocab_size: int | None) -> None:
        """Raise ConfigError for buffers of fewer requests than a drafter's, or another vocabulary than the target's."""
        rows, columns = self.bias.shape
        if rows < requests or (vocab_size is not None and columns != vocab_size):
            wanted = f"{requests} requests" + ("" if vocab_size is None else f" and {vocab_size} tokens")
            raise ConfigError(
                f"sampling is for {rows} requests and {columns} tokens, the drafter's batches have {wanted}: call "
                "allocate_sampling(max_num_requests, vocab_size, device) with the target's vocabulary"
            )

    def sliced(self, rows: slice) -> SamplingBuffers:
        return SamplingBuffers(*(tensor[rows] for tensor in self))

    def adjusted_drafts(
        self, logits: Tensor, draft_to_target: Tensor | None, temperature: Tensor, drafted: Tensor | None = None
    ) -> Tensor:
        """`ops.adjust_logits` for the drafter's logits, so that drafts come from where the target's tokens do.

        Args:
            logits: [R * n, draft_vocab]: n rows per request, all with the same context.
            draft_to_target: as in `ops.Drafts`.
            drafted: int64 [R, K]: drafts that count as tokens of the output; -1 is none.
        """
        requests = temperature.shape[0]
        if drafted is None:
            drafted = self.top_k.new_empty((requests, 0))
        everywhere = self.top_k.new_full((logits.shape[0],), -1)  # every draft is in every row's context
        return ops.adjust_logits(logits, temperature, self, drafted, everywhere, draft_to_target)


@checked
def allocate_sampling(requests: Requests, vocab_size: Tokens, device: torch.device) -> SamplingBuffers:
    """Allocate buffers for `requests` requests that ask for nothing; `vocab_size` is the target's."""

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
