"""The drafter, what a round hands over, and the draft programs: chain, tree, stepwise, and those of one pass."""

from specgraph.config import DraftConfig, DraftTree
from specgraph.draft.bound import BoundTensors
from specgraph.draft.drafter import Drafter
from specgraph.draft.round import DraftTokens, ProposeBatch, RoundBuffers, allocate_round
from specgraph.draft.sampling_buffers import SamplingBuffers, allocate_sampling

__all__ = [
    "BoundTensors",
    "DraftConfig",
    "DraftTokens",
    "DraftTree",
    "Drafter",
    "ProposeBatch",
    "RoundBuffers",
    "SamplingBuffers",
    "allocate_round",
    "allocate_sampling",
]
