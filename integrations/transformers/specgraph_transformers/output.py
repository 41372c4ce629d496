"""The output of `generate`, column by column. It calls stopping criteria and streamer as `generate` does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import EosTokenCriteria


class Output:
    """Sequences of equal length that grow by one column at a time.

    Requests accept different numbers of drafts, so some are ahead. A column is added once every unfinished request has
    a token for it. So stopping criteria see the same tensors, in the same order, as without drafts.
    """

    def __init__(
        self, input_ids: Tensor, stopping_criteria: Any, pad_token_id: Tensor | None, max_length: int, streamer: Any
    ) -> None:
        """
        Args:
            input_ids: int64 [n, P], the prompts with their padding.
            stopping_criteria: a `StoppingCriteriaList`.
            pad_token_id: int64 scalar, the token of finished requests. None if the model has none.
            max_length: the most columns of the whole output.
            streamer: an object with `put` and `end`, or None.
        """
        self.sequences = input_ids
        """int64 [n, P + columns]: the prompts and all columns so far."""
        self.token_ids: list[list[int]] = [[] for _ in input_ids]
        """The generated tokens of each request, which may be ahead of `sequences`."""
        self._criteria, self._streamer = stopping_criteria, streamer
        self._prompt, self._budget = input_ids.shape[1], max_length - input_ids.shape[1]
        stops = [criterion for criterion in stopping_criteria if hasattr(criterion, "eos_token_id")]
        # Without a criterion for an end token `generate` does not pad: requests go on until all are finished.
        self._pad = pad_token_id.to(input_ids.device) if stops and pad_token_id is not None else None
        self._eos = {
            int(token) for criterion in stops if type(criterion) is EosTokenCriteria for token in criterion.eos_token_id
        }
        self._unfinished = torch.ones(len(input_ids), dtype=torch.bool, device=input_ids.device)
        self._open = [True] * len(input_ids)

    @property
    def num_columns(self) -> int:
        """The number of columns after the prompts so far."""
        return self.sequences.shape[1] - self._prompt

    def drafting(self, row: int) -> bool:
        """Return True if request `row` can use more tokens than it has."""
        tokens = self.token_ids[row]
        ended = bool(tokens) and tokens[-1] in self._eos
        return self._open[row] and not ended and len(tokens) < self._budget

    def append(self, row: int, tokens: Sequence[int]) -> int:
        """Append tokens to request `row`, up to its end. Returns the number of appended tokens."""
        kept = list(tokens[: self._budget - len(self.token_ids[row])])
        ends = [place for place, token in enumerate(kept) if token in self._eos]
        kept = kept[: ends[0] + 1] if ends else kept
        self.token_ids[row] += kept
        return len(kept)

    def advance(self) -> bool:
        """Add all complete columns. Returns True if generation has ended."""
        while all(
            len(tokens) > self.num_columns or not open_
            for tokens, open_ in zip(self.token_ids, self._open, strict=True)
        ):
            column = self.num_columns
            own = [tokens[column] if column < len(tokens) else 0 for tokens in self.token_ids]
            added = torch.tensor(own, dtype=self.sequences.dtype, device=self.sequences.device)
            if self._pad is not None:
                added = torch.where(self._unfinished, added, self._pad)
            self.sequences = torch.cat([self.sequences, added[:, None]], dim=-1)
            self._unfinished = self._unfinished & ~self._criteria(self.sequences, None)
            if self._streamer is not None:
                self._streamer.put(added.cpu())
            unfinished = self._unfinished.tolist()
            if not any(unfinished):
                return True
            if self._pad is not None:
                self._open = unfinished
        return False

    def end(self) -> None:
        """End the streamer."""
        if self._streamer is not None:
            self._streamer.end()
