"""Decoders around the random pairs of `draft.pairs`, in the loops of tests that need many."""

from __future__ import annotations

from typing import Any

from draft.pairs import make_head, make_target
from specgraph_conformance.decode_rig import decoder_settings
from specgraph_run.decoder import SpeculativeDecoder

from specgraph.attention import PagedAttention, PagedHostAttention
from specgraph.cpu import CpuPlatform


def make_pair_decoder(kind: str | None, lengths: str = "device", **settings: Any) -> SpeculativeDecoder:
    """Return a captured decoder of the target and its drafter of this kind; None is the target alone.

    Args:
        lengths: where attention reads sequence lengths, "device" or "host".
        settings: of `DraftConfig` and `DecoderOptions`; K = 3, blocks of 4 and eager
            prefill passes of 8 rows unless told.
    """
    target, platform = make_target(), CpuPlatform()
    defaults = {"num_speculative_tokens": 3, "block_size": 4, "prefill": "eager", "prefill_sizes": [8]}
    config = decoder_settings(**(defaults | settings))
    attention = PagedHostAttention(platform) if lengths == "host" else PagedAttention()
    head = None if kind is None else make_head(kind, target)
    decoder = SpeculativeDecoder(target, head, platform, *config, attention=attention)
    decoder.capture()
    return decoder
