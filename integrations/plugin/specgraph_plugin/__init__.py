"""Drafts inside a host engine, over the weights and KV cache of the drafter that the engine has loaded."""

from specgraph_plugin.counts import ProposeCounts
from specgraph_plugin.fast_path import FastPath
from specgraph_plugin.prompts import PromptChunk, PromptPass
from specgraph_plugin.verify_output import VerifyOutput, fill_batch

__all__ = ["FastPath", "PromptChunk", "PromptPass", "ProposeCounts", "VerifyOutput", "fill_batch"]
