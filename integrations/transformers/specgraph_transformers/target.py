"""The user's own model as the target: its passes over a left-padded batch, and its KV cache between them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specgraph_transformers.kv_rows import keep_rows


class TransformersTarget:
    """A transformers model with its cache, for n requests of unequal lengths.

    The cache has as many columns as the longest request has tokens. A shorter request is padded on the left, as prompts
    of a batch are, so every kind of mask that the model makes (causal, sliding windows, chunks) stays right.
    """

    def __init__(
        self, model: Any, cache: Any, lengths: Sequence[int], max_length: int, aux_layers: Sequence[int]
    ) -> None:
        """
        Args:
            model: a causal language model of transformers.
            cache: an empty `DynamicCache` for it.
            lengths: tokens of each prompt, padding not counted.
            max_length: positions that the model has. The last drafts of a request may lie beyond: their rows are
                computed at the last position, and never used.
            aux_layers: hidden state k enters layer k of the model, and the one behind the final norm is the number of
                layers + 1, as in `Target.forward`; empty for that state alone.
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
        """The pass over the prompts, as `generate` makes it.

        Args:
            input_ids: int64 [n, P], padded on the left.
            attention_mask: [n, P], or None where nothing is padded.
            position_ids: as `generate` made them; None for a model that takes none.

        Returns:
            Logits of the last tokens, [n, vocab], and the hidden states for the drafter, [n, P, aux_size].
        """
        logits, aux = self._run(input_ids, attention_mask, position_ids, num_logits=1, is_first_iteration=True)
        self.cache.activate_past_recording()  # sliding windows then keep what taking rows back needs
        self._columns = input_ids.shape[1]
        return logits[:, -1], aux

    def verify(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """The pass over the last token of each request and its drafts. `keep` must follow.

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
        """Forget all but the first `kept[i]` rows of request i in the last `verify`."""
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
        # transformers has no last layer's output before the norm: the entry in its place is behind it
        states = [out.hidden_states[min(k, len(out.hidden_states) - 1)] for k in self.aux_layers]
        return out.logits[:, -num_logits:], torch.cat([state.to(states[0].device) for state in states], dim=-1)
