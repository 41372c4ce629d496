"""Speculative decoding end to end: target verify, rejection sampling, KV blocks, rounds, metrics."""

from specgraph.engine.blocks import BlockAllocator, allocate_caches
from specgraph.engine.config import EngineConfig, acceptance_chances
from specgraph.engine.decoder import SpeculativeDecoder
from specgraph.engine.metrics import AcceptanceMetrics
from specgraph.engine.request import Chunk, Generation, Request

__all__ = [
    "AcceptanceMetrics",
    "BlockAllocator",
    "Chunk",
    "EngineConfig",
    "Generation",
    "Request",
    "SpeculativeDecoder",
    "acceptance_chances",
    "allocate_caches",
]
