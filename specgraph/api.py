"""The names at the top of `specgraph`: what an engine needs to draft, and text from two folders.

`specgraph/__init__.py` hands them out when they are first asked for. The other public names are in `__all__` of
`specgraph.attention`, `checkpoints`, `models`, `engine`, `parallel` and `errors`.
"""

from specgraph.attention import AttentionBackend, AttentionLayer, KVCache, PagedAttention, allocate_caches
from specgraph.checkpoints import load_drafter, load_target
from specgraph.device import Platform, open_platform
from specgraph.draft import (
    BoundTensors,
    DraftConfig,
    Drafter,
    DraftTokens,
    DraftTree,
    ProposeBatch,
    SamplingBuffers,
    allocate_sampling,
)
from specgraph.engine.load import load_generator, shipped_pair
from specgraph.errors import SpecgraphError
from specgraph.models import DraftHead, DraftOutput
from specgraph.options import EngineOptions

__all__ = [
    "AttentionBackend",
    "AttentionLayer",
    "BoundTensors",
    "DraftConfig",
    "DraftHead",
    "DraftOutput",
    "DraftTokens",
    "DraftTree",
    "Drafter",
    "EngineOptions",
    "KVCache",
    "PagedAttention",
    "Platform",
    "ProposeBatch",
    "SamplingBuffers",
    "SpecgraphError",
    "allocate_caches",
    "allocate_sampling",
    "load_drafter",
    "load_generator",
    "load_target",
    "open_platform",
    "shipped_pair",
]
