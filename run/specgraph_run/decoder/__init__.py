"""Speculative decoding of token ids: the target's verify, rejection sampling, KV blocks, rounds, metrics."""

from specgraph_run.decoder.decoder import SpeculativeDecoder
from specgraph_run.decoder.layout import ParallelLayout, join_layout
from specgraph_run.decoder.metrics import AcceptanceMetrics
from specgraph_run.decoder.request import Chunk, Generation, Request
from specgraph_run.decoder.sampling_buffers import SamplingBuffers, allocate_sampling
from specgraph_run.options import DecoderOptions

__all__ = [
    "AcceptanceMetrics",
    "Chunk",
    "DecoderOptions",
    "Generation",
    "ParallelLayout",
    "Request",
    "SamplingBuffers",
    "SpeculativeDecoder",
    "allocate_sampling",
    "join_layout",
]
