"""Paged attention: metadata, the backend interface, and the core's own backends."""

from specgraph.attention.caches import allocate_caches
from specgraph.attention.choose import AttentionChoice, choose_attention
from specgraph.attention.interface import Attend, AttentionBackend, AttentionLayer, ForwardContext, Store, TaskKey
from specgraph.attention.metadata import NULL_BLOCK, NULL_SLOT, AttentionMetadata
from specgraph.attention.paged import PagedAttention, PagedHostAttention
from specgraph.ops import HostLengths, KVCache

__all__ = [
    "NULL_BLOCK",
    "NULL_SLOT",
    "Attend",
    "AttentionBackend",
    "AttentionChoice",
    "AttentionLayer",
    "AttentionMetadata",
    "ForwardContext",
    "HostLengths",
    "KVCache",
    "PagedAttention",
    "PagedHostAttention",
    "Store",
    "TaskKey",
    "allocate_caches",
    "choose_attention",
]
