"""The user's own model as the target, with its KV cache, over a left-padded batch."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specgraph_transformers.kv_rows import keep_rows


class TransformersTarget:
    """A transformers model with its cache, for n requests of different lengths.

    The cache has one column per token of the longest request. A shorter request is padded on the left, like the prompts
    of a batch. So every mask that the model makes (causal, sliding window, chunked) stays right.
    """

    def __init__(
        self, model: Any, cache: Any, lengths: Sequence[int], max_length: int, aux_layers: Sequence[int]
    ) -> None:
        """
        Args:
            model: a causal language model of transformers.
            cache: an empty `DynamicCache` for it.
            lengths: tokens of each prompt, without padding.
            max_length: the positions that a request may have. Its last drafts may be past them: their rows are computed
                at the last position, and never used.
            aux_layers: the hidden states for the drafter, numbered as in `Target.forward`: k enters layer k, and the
                number of layers + 1 is the state after the final norm. If it is empty, that state alone.
        """
        self.model, self.cache, self.aux_layers = model, cache, tuple(aux_layers) or (-1,)
        self.lengths = list(lengths)
        """Tokens of each request in the cache."""
        self._columns, self._last_position, self._query_len = 0, max_length - 1, 0
        self._takes_positions, self._takes_logits_to_keep = (
            name in inspect.signature(model.forward).parameters for name in ("position_ids", "logits_to_keep")
        )

    def prefill(
        self, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Run the model over the prompts, as `generate` does.

        Args:
            input_ids: int64 [n, P], padded on the left.
            attention_mask: [n, P]. None if no prompt is padded.
            position_ids: [n, P] or [1, P], from `generate`. None for a model without them.

        Returns:
            Logits of the last tokens, [n, vocab], and the hidden states for the drafter, [n, P, aux_size].
        """
        logits, aux = self._run(input_ids, attention_mask, position_ids, num_logits=1, is_first_iteration=True)
        self.cache.activate_past_recording()  # sliding windows then keep the columns that `keep` needs
        self._columns = input_ids.shape[1]
        return logits[:, -1], aux

    def verify(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Run the model over the last token and the drafts of each request. Call `keep` afterwards.

        Args:
            token_ids: int64 [n, query_len].

        Returns:
            Logits, [n, query_len, vocab], and the hidden states for the drafter, [n, query_len, aux_size].
        """
        device, self._query_len = token_ids.device, token_ids.shape[1]
        lengths = torch.tensor(self.lengths, device=device)[:, None]
        positions, mask = None, None
        if self._takes_positions:
            positions = (lengths + torch.arange(self._query_len, device=device)).clamp(max=self._last_position)
        if min(self.lengths) < self._columns:
            columns = torch.arange(self._columns + self._query_len, device=device)
            mask = (columns >= self._columns - lengths).long()
        return self._run(token_ids, mask, positions, num_logits=self._query_len, is_first_iteration=False)

    def keep(self, kept: Sequence[int]) -> None:
        """Remove the rows of the last `verify` from the cache, except the first `kept[i]` rows of request i."""
        self._columns = keep_rows(self.cache, self.lengths, kept, self._columns, self._query_len)
        self.lengths = [length + rows for length, rows in zip(self.lengths, kept, strict=True)]

    def _run(
        self, ids: Tensor, mask: Tensor | None, positions: Tensor | None, *, num_logits: int, is_first_iteration: bool
    ) -> tuple[Tensor, Tensor]:
        given = {} if positions is None else {"position_ids": positions}
        inputs = self.model.prepare_inputs_for_generation(
            ids,
            next_sequence_length=ids.shape[1],
            cache=self.cache,
            attention_mask=mask,
            use_cache=True,
            is_first_iteration=is_first_iteration,
            **given,
        )
        if self._takes_logits_to_keep:
            inputs["logits_to_keep"] = num_logits
        out = self.model(**inputs, output_hidden_states=True, return_dict=True)
        # transformers' last hidden state is after the final norm; the state before it is not returned.
        states = [out.hidden_states[min(k, len(out.hidden_states) - 1)] for k in self.aux_layers]
        return out.logits[:, -num_logits:], torch.cat([state.to(states[0].device) for state in states], dim=-1)
