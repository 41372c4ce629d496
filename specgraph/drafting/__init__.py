"""The drafter, what a round hands over, and the draft programs: chain, tree, stepwise, masked and parallel."""

from specgraph.drafting.bound import BoundTensors
from specgraph.drafting.buffers import DraftBuffers, allocate_buffers
from specgraph.drafting.chain import ChainProgram
from specgraph.drafting.config import DraftConfig
from specgraph.drafting.drafter import Drafter
from specgraph.drafting.parallel import ParallelProgram
from specgraph.drafting.program import DraftProgram
from specgraph.drafting.round import DraftTokens, ProposeBatch, RoundBuffers, allocate_round
from specgraph.drafting.sampling_buffers import SamplingBuffers, allocate_sampling
from specgraph.drafting.shapes import DraftShape, DraftTree
from specgraph.drafting.stepwise import StepwiseProgram
from specgraph.drafting.tree import TreeProgram

__all__ = [
    "BoundTensors",
    "ChainProgram",
    "DraftBuffers",
    "DraftConfig",
    "DraftProgram",
    "DraftShape",
    "DraftTokens",
    "DraftTree",
    "Drafter",
    "ParallelProgram",
    "ProposeBatch",
    "RoundBuffers",
    "SamplingBuffers",
    "StepwiseProgram",
    "TreeProgram",
    "allocate_buffers",
    "allocate_round",
    "allocate_sampling",
]
