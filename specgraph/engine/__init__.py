"""Speculative decoding end to end: target verify, rejection sampling, KV blocks, rounds, text, metrics."""

from specgraph.engine.decoder import SpeculativeDecoder
from specgraph.engine.metrics import AcceptanceMetrics
from specgraph.engine.request import Chunk, Generation, Request
from specgraph.engine.text import TextGenerator
from specgraph.options import DecoderOptions

__all__ = [
    "AcceptanceMetrics",
    "Chunk",
    "DecoderOptions",
    "Generation",
    "Request",
    "SpeculativeDecoder",
    "TextGenerator",
]
