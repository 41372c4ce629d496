"""The public names of specgraph. `specgraph/__init__.py` hands them out when they are first asked for."""

from specgraph.attention import AttentionBackend, AttentionLayer, AttentionMetadata, KVCache, PagedAttention
from specgraph.checkpoints import load_drafter, load_target
from specgraph.decoding.request import Generation, Request
from specgraph.decoding.text import TextGenerator, load_generator, shipped_pair
from specgraph.drafting import DraftConfig, Drafter, DraftTokens, ProposeBatch
from specgraph.errors import SpecgraphError
from specgraph.models.protocol import DraftHead, DraftOutput, Target, TargetOutput
from specgraph.options import EngineOptions
from specgraph.platforms import Platform, open_platform

__all__ = [
    "AttentionBackend",
    "AttentionLayer",
    "AttentionMetadata",
    "DraftConfig",
    "DraftHead",
    "DraftOutput",
    "DraftTokens",
    "Drafter",
    "EngineOptions",
    "Generation",
    "KVCache",
    "PagedAttention",
    "Platform",
    "ProposeBatch",
    "Request",
    "SpecgraphError",
    "Target",
    "TargetOutput",
    "TextGenerator",
    "load_drafter",
    "load_generator",
    "load_target",
    "open_platform",
    "shipped_pair",
]
