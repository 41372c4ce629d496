"""The drafter, the batch that it takes and the drafts that it returns, and a draft program for each kind of head."""

from specgraph.config import DraftConfig, DraftTree
from specgraph.draft.batch import DraftTokens, ProposeBatch, SharedBuffers
from specgraph.draft.block import BlockKind
from specgraph.draft.bound import BoundTensors
from specgraph.draft.chain import ChainKind, DraftModelKind
from specgraph.draft.drafter import Drafter
from specgraph.draft.kind import Kind
from specgraph.draft.logits import NextLogits, OutputProjection, RowLogits
from specgraph.draft.masked import MaskedKind
from specgraph.draft.modules import ModulesKind
from specgraph.draft.ngram import NgramHead
from specgraph.draft.parallel import ParallelKind
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
    "BlockKind",
    "BoundTensors",
    "ChainKind",
    "DraftConfig",
    "DraftHead",
    "DraftModelKind",
    "DraftOutput",
    "DraftTokens",
    "DraftTree",
    "Drafter",
    "Kind",
    "LogitsAdjustment",
    "MaskedHead",
    "MaskedKind",
    "ModulesHead",
    "ModulesKind",
    "NextLogits",
    "NgramHead",
    "OutputProjection",
    "ParallelHead",
    "ParallelKind",
    "ProposeBatch",
    "RowLogits",
    "SharedBuffers",
]
