"""Where a position's key and value go, one Python integer at a time: the oracle for slot mappings."""

from __future__ import annotations

from specgraph.ops.slots import NULL_BLOCK, NULL_SLOT


def naive_slot(position: int, blocks: list[int], valid: bool, max_model_len: int, block_size: int) -> int:
    """The slot of one position of one request, by the contract of `specgraph.ops.slots`."""
    if not valid or not 0 <= position < max_model_len:
        return NULL_SLOT
    block = blocks[position // block_size]
    return NULL_SLOT if block == NULL_BLOCK else block * block_size + position % block_size
