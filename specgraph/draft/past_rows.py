"""What rows took whose keys a drafter with several modules computes again, kept by KV block.

Module i takes at position p the token i + 1 places further, so the last i positions of a text have keys of drafted
tokens until later rounds know better. Each propose computes the K - 1 positions before its round once more; the
target's hidden states there are those of earlier rounds, which no engine hands over again.
"""

from __future__ import annotations

import torch

from specgraph.models.protocol import Head
from specgraph.ops.past_rows import PastRows


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
