"""Speculative decoding end to end: target verify, rejection sampling, KV blocks, rounds, metrics."""

from specgraph.decoding.blocks import BlockAllocator, allocate_caches
from specgraph.decoding.decoder import SpeculativeDecoder
from specgraph.decoding.metrics import AcceptanceMetrics
from specgraph.decoding.request import Chunk, FinishReason, Generation, Request
from specgraph.decoding.target_runner import TargetRunner
from specgraph.decoding.verify_buffers import VerifyBuffers, VerifyOutputs

__all__ = [
    "AcceptanceMetrics",
    "BlockAllocator",
    "Chunk",
    "FinishReason",
    "Generation",
    "Request",
    "SpeculativeDecoder",
    "TargetRunner",
    "VerifyBuffers",
    "VerifyOutputs",
    "allocate_caches",
]
