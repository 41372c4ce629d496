"""Draft programs, their lowerings to graphs, and the drafter that runs them."""

from specgraph.drafting.batch import DraftTokens, ProposeBatch
from specgraph.drafting.buffers import DraftBuffers, allocate_buffers
from specgraph.drafting.chain import ChainProgram
from specgraph.drafting.config import DraftConfig, acceptance_chances
from specgraph.drafting.drafter import Drafter
from specgraph.drafting.lowering import Launch, Resolution, launches, resolve
from specgraph.drafting.parallel import ParallelProgram
from specgraph.drafting.program import DraftProgram
from specgraph.drafting.prompt import PromptBuffers, allocate_prompt, prompt_metadata
from specgraph.drafting.prompt_passes import PromptPasses
from specgraph.drafting.stepwise import StepwiseProgram

__all__ = [
    "ChainProgram",
    "DraftBuffers",
    "DraftConfig",
    "DraftProgram",
    "DraftTokens",
    "Drafter",
    "Launch",
    "ParallelProgram",
    "PromptBuffers",
    "PromptPasses",
    "ProposeBatch",
    "Resolution",
    "StepwiseProgram",
    "acceptance_chances",
    "allocate_buffers",
    "allocate_prompt",
    "launches",
    "prompt_metadata",
    "resolve",
]
