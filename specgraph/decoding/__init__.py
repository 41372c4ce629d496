"""Speculative decoding end to end: target verify, rejection sampling, KV blocks, rounds, metrics."""

from specgraph.decoding.blocks import BlockAllocator, allocate_caches
from specgraph.decoding.config import EngineConfig, acceptance_chances
from specgraph.decoding.decoder import SpeculativeDecoder
from specgraph.decoding.metrics import AcceptanceMetrics
from specgraph.decoding.request import Chunk, FinishReason, Generation, Request
from specgraph.decoding.target import TargetRunner
from specgraph.decoding.verify import VerifyBuffers, VerifyProgram

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
