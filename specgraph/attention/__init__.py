"""Paged attention: metadata, the backend interface, and the core's own backends."""

from specgraph.attention.interface import (
    AdvancingAttention,
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
    advance,
    allocate_block_table,
    allocate_metadata,
)
from specgraph.attention.paged import PagedAttention, PagedHostAttention, choose_attention, store_rows

__all__ = [
    "NULL_BLOCK",
    "NULL_SLOT",
    "AdvancingAttention",
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
    "advance",
    "allocate_block_table",
    "allocate_metadata",
    "bind",
    "choose_attention",
    "named_cache_tensors",
    "store_rows",
]
