"""Paged attention: metadata, the backend interface, and the core's own backends."""

from specgraph.attention.choose import AttentionChoice, check_trees, choose_attention, unsupported
from specgraph.attention.interface import (
    Attend,
    AttentionBackend,
    AttentionFactory,
    AttentionLayer,
    PrepareUpdate,
    StepContext,
    Store,
    TaskKey,
    UpdateSink,
    bind,
    named_cache_tensors,
)
from specgraph.attention.metadata import (
    MAX_TREE_LEN,
    NULL_BLOCK,
    NULL_SLOT,
    AttentionMetadata,
    advance,
    allocate_block_table,
    allocate_metadata,
)
from specgraph.attention.paged import NO_ANCESTOR_MASK, PagedAttention, PagedHostAttention, move_rows, store_rows
from specgraph.ops import HostLengths, KVCache

__all__ = [
    "MAX_TREE_LEN",
    "NO_ANCESTOR_MASK",
    "NULL_BLOCK",
    "NULL_SLOT",
    "Attend",
    "AttentionBackend",
    "AttentionChoice",
    "AttentionFactory",
    "AttentionLayer",
    "AttentionMetadata",
    "HostLengths",
    "KVCache",
    "PagedAttention",
    "PagedHostAttention",
    "PrepareUpdate",
    "StepContext",
    "Store",
    "TaskKey",
    "UpdateSink",
    "advance",
    "allocate_block_table",
    "allocate_metadata",
    "bind",
    "check_trees",
    "choose_attention",
    "move_rows",
    "named_cache_tensors",
    "store_rows",
    "unsupported",
]
