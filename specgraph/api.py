"""The top-level names of `specgraph`: all that a host engine needs to draft.

The other public names are in `__all__` of `specgraph.attention`, `specgraph.draft`, `specgraph.parallel` and
`specgraph.errors`.
"""

from specgraph.attention import AttentionBackend, AttentionLayer, KVCache, PagedAttention, allocate_caches
from specgraph.device import Platform, open_platform
from specgraph.draft import (
    BoundTensors,
    ChainKind,
    DraftConfig,
    Drafter,
    DraftHead,
    DraftOutput,
    DraftTokens,
    DraftTree,
    ProposeBatch,
)
from specgraph.errors import SpecgraphError

__all__ = [
    "AttentionBackend",
    "AttentionLayer",
    "BoundTensors",
    "ChainKind",
    "DraftConfig",
    "DraftHead",
    "DraftOutput",
    "DraftTokens",
    "DraftTree",
    "Drafter",
    "KVCache",
    "PagedAttention",
    "Platform",
    "ProposeBatch",
    "SpecgraphError",
    "allocate_caches",
    "open_platform",
]
