"""Speculative decoding end to end: target verify, rejection sampling, KV blocks, rounds, metrics."""

from specgraph.engine.blocks import BlockAllocator, allocate_caches
from specgraph.engine.config import EngineConfig, acceptance_chances
from specgraph.engine.decoder import SpeculativeDecoder
from specgraph.engine.metrics import AcceptanceMetrics
from specgraph.engine.request import Chunk, FinishReason, Generation, Request
from specgraph.engine.target import TargetRunner
from specgraph.engine.verify import VerifyBuffers, VerifyProgram

__all__ = [
    "AcceptanceMetrics",
    "BlockAllocator",
    "Chunk",
    "EngineConfig",
    "FinishReason",
    "Generation",
    "Request",
    "SpeculativeDecoder",
    "TargetRunner",
    "VerifyBuffers",
    "VerifyProgram",
    "acceptance_chances",
    "allocate_caches",
]
