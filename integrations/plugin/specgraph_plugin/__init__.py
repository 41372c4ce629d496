"""Drafting inside an engine that has loaded the drafter itself: over its weights, its KV cache and its rounds."""

from specgraph_plugin.counts import ProposeCounts
from specgraph_plugin.fast_path import FastPath
from specgraph_plugin.prompts import Chunk, PromptPass
from specgraph_plugin.round_end import RoundEnd, fill_round

__all__ = ["Chunk", "FastPath", "PromptPass", "ProposeCounts", "RoundEnd", "fill_round"]
