"""A round's end through specgraph's graph, and the draft tokens that it leaves for the next round."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specgraph import DraftConfig, Drafter, KVCache, Platform
from specgraph.models.eagle import EagleHead
from specgraph.models.eagle3 import Eagle3Head
from specgraph_sglang.round_end import RoundEnd, fill_round


class KeptTokens:
    """The draft tokens of the last round by request slot, and on the host which slots have them.

    SGLang drafts at the head of a round; specgraph at the tail of the round before, and keeps the tokens until then.
    """

    def __init__(self, num_slots: int, num_speculative_tokens: int, device: torch.device) -> None:
        """
        Args:
            num_slots: rows of SGLang's `req_to_token`.
        """
        self.tokens = torch.zeros(num_slots, num_speculative_tokens, dtype=torch.int64, device=device)
        self._held: set[int] = set()

    def keep(self, slots: Sequence[int], indices: Tensor, token_ids: Tensor) -> None:
        """Keep int64 [n, K] for the slots, which `indices` holds on the device."""
        self.tokens.index_copy_(0, indices, token_ids)
        self._held.update(slots)

    def forget(self, slots: Sequence[int]) -> None:
        """These slots have no tokens any more: their requests begin, or SGLang drafted for them."""
        self._held.difference_update(slots)

    def holds(self, slots: Sequence[int]) -> list[bool]:
        """Which of the slots have tokens."""
        return [slot in self._held for slot in slots]

    def take(self, indices: Tensor) -> Tensor:
        """int64 [n, K]."""
        return self.tokens.index_select(0, indices)


class FastPath:
    """The drafter over SGLang's weights and KV cache, with every captured size; made when SGLang captures its graphs.

    Not thread-safe. Owns its graphs and buffers; weights and KV cache are SGLang's.
    """

    def __init__(
        self,
        head: Eagle3Head | EagleHead,
        caches: Sequence[KVCache],
        platform: Platform,
        *,
        num_speculative_tokens: int,
        capture_sizes: Sequence[int],
        max_model_len: int,
        page_size: int,
    ) -> None:
        """Captures.

        Raises:
            ConfigError, UnsupportedError, CaptureError: as of `Drafter` and its `capture`.
        """
        self.config = DraftConfig(
            num_speculative_tokens=num_speculative_tokens,
            max_num_requests=max(capture_sizes),
            max_model_len=max_model_len,
            block_size=page_size,
            capture_sizes=sorted(capture_sizes),
            prefill_sizes=(1,),  # SGLang writes the prompts' keys and values itself
            prefill="eager",
        )
        self.drafter = Drafter(head, caches, platform, self.config)
        self.drafter.capture()

    def fill(self, end: RoundEnd) -> None:
        """Take the round over; nothing of SGLang's is read after it but weights and KV cache."""
        fill_round(end, self.drafter.inputs(end.num_requests), self.config.max_model_len, self.config.block_size)

    def propose(self, num_requests: int) -> Tensor:
        """Draft after `fill`.

        Returns:
            int64 [n, K]: a view of the drafter's memory, which the next propose overwrites.
        """
        return self.drafter.propose(self.drafter.inputs(num_requests), copy=False).token_ids
