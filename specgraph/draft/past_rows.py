"""What rows took whose keys a drafter with several modules computes again, kept by KV block.

Module i takes at position p the token i + 1 places further, so the last i positions of a text have keys of drafted
tokens until later rounds know better. Each propose computes the K - 1 positions before its round once more; the
target's hidden states there are those of earlier rounds, which no engine hands over again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from specgraph.models.protocol import Head


@dataclass(frozen=True, slots=True)
class PastRows:
    """Of each KV block the last H positions that were written: position p is entry p % block_size % H of its block.

    It belongs to the block, as keys and values do: requests that share a block share it, and an engine that copies a
    block's KV copies it too (else its last rows keep the keys that they have). An entry that holds another position
    than is looked for counts as none.
    """

    token_ids: Tensor
    """int64 [num_blocks, H]: the token after the position."""
    positions: Tensor
    """int64 [num_blocks, H]: -1 for none."""
    hidden: Tensor
    """[num_blocks, H, hidden_size]: the target's hidden state there, as the first module takes it."""

    def named_tensors(self) -> Mapping[str, Tensor]:
        """The tensors by name, for the read-set."""
        return {f"past_rows.{field.name}": getattr(self, field.name) for field in fields(self)}


def num_entries(num_speculative_tokens: int, block_size: int) -> int:
    """H: K - 1, or the block size where that is less."""
    return min(num_speculative_tokens - 1, block_size)


def allocate_past_rows(
    num_blocks: int, entries: int, hidden_size: int, dtype: torch.dtype, device: torch.device
) -> PastRows:
    """Memory in which nothing is kept yet. `entries`: H."""
    return PastRows(
        token_ids=torch.zeros(num_blocks, entries, dtype=torch.int64, device=device),
        positions=torch.full((num_blocks, entries), -1, dtype=torch.int64, device=device),
        hidden=torch.zeros(num_blocks, entries, hidden_size, dtype=dtype, device=device),
    )


def past_rows_bytes(head: Head, num_speculative_tokens: int, block_size: int) -> int:
    """Bytes per KV block, beside the KV; 0 for a drafter whose one module serves every step."""
    if head.kind != "modules":
        return 0
    return num_entries(num_speculative_tokens, block_size) * (head.hidden_size * head.dtype.itemsize + 16)
