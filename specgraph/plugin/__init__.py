"""Drafting inside an engine that has loaded the drafter itself: over its weights, its KV cache and its rounds."""

from specgraph.plugin.fast_path import FastPath
from specgraph.plugin.round_end import RoundEnd, fill_round, fill_round_reference

__all__ = ["FastPath", "RoundEnd", "fill_round", "fill_round_reference"]
