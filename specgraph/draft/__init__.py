"""The drafter, the batch that it takes and the drafts that it returns, and a draft program for each kind of head."""

from specgraph.config import DraftConfig, DraftTree
from specgraph.draft.batch import DraftTokens, ProposeBatch, SharedBuffers
from specgraph.draft.bound import BoundTensors
from specgraph.draft.drafter import Drafter
from specgraph.draft.logits import NextLogits, OutputProjection, RowLogits
from specgraph.draft.ngram import NgramHead
from specgraph.draft.protocol import (
    BlockHead,
    DraftHead,
    DraftOutput,
    LogitsAdjustment,
    MaskedHead,
    ModulesHead,
    ParallelHead,
)

__all__ = [
    "BlockHead",
    "BoundTensors",
    "DraftConfig",
    "DraftHead",
    "DraftOutput",
    "DraftTokens",
    "DraftTree",
    "Drafter",
    "LogitsAdjustment",
    "MaskedHead",
    "ModulesHead",
    "NextLogits",
    "NgramHead",
    "OutputProjection",
    "ParallelHead",
    "ProposeBatch",
    "RowLogits",
    "SharedBuffers",
]
