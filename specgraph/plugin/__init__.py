"""Drafting inside an engine that has loaded the drafter itself: over its weights, its KV cache and its rounds."""

from specgraph.plugin.counts import ProposeCounts
from specgraph.plugin.fast_path import FastPath
from specgraph.plugin.prompts import Chunk, PromptPass
from specgraph.plugin.round_end import RoundEnd, fill_round

__all__ = ["Chunk", "FastPath", "PromptPass", "ProposeCounts", "RoundEnd", "fill_round"]
