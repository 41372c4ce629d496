"""Paged attention as the drafting engine sees it: metadata, backends, device and host parameters."""

from specgraph.attention.choose import choose_attention
from specgraph.attention.interface import (
    Attend,
    AttentionBackend,
    AttentionFactory,
    AttentionLayer,
    KVCache,
    StepContext,
    Store,
    TaskKey,
    UpdateSink,
    bind,
    named_cache_tensors,
)
from specgraph.attention.metadata import (
    NULL_BLOCK,
    NULL_SLOT,
    AttentionMetadata,
    HostLengths,
    allocate_block_table,
    allocate_metadata,
)
from specgraph.attention.paged import PagedAttention, PagedHostAttention, store_rows

__all__ = [
    "NULL_BLOCK",
    "NULL_SLOT",
    "Attend",
    "AttentionBackend",
    "AttentionFactory",
    "AttentionLayer",
    "AttentionMetadata",
    "HostLengths",
    "KVCache",
    "PagedAttention",
    "PagedHostAttention",
    "StepContext",
    "Store",
    "TaskKey",
    "UpdateSink",
    "allocate_block_table",
    "allocate_metadata",
    "bind",
    "choose_attention",
    "named_cache_tensors",
    "store_rows",
]
