"""The drafter, what a round hands over, and the draft programs: chain, tree, stepwise, masked and parallel."""

from specgraph.draft.bound import BoundTensors
from specgraph.draft.buffers import DraftBuffers, allocate_buffers
from specgraph.draft.chain import ChainProgram
from specgraph.draft.config import DraftConfig
from specgraph.draft.drafter import Drafter
from specgraph.draft.parallel import ParallelProgram
from specgraph.draft.program import DraftProgram
from specgraph.draft.round import DraftTokens, ProposeBatch, RoundBuffers, allocate_round
from specgraph.draft.sampling_buffers import SamplingBuffers, allocate_sampling
from specgraph.draft.shapes import DraftShape, DraftTree
from specgraph.draft.stepwise import StepwiseProgram
from specgraph.draft.tree import TreeProgram

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
