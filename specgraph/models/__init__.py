"""Targets and draft heads as plain tensor code: no files, no device names, no graph calls.

`protocol` states what a model of your own must offer. `specgraph.checkpoints` builds the models here from folders,
`eagle_head_from_module` and `eagle3_head_from_module` from the modules of an engine.
"""

from specgraph.draft.logits import NextLogits, OutputProjection, RowLogits
from specgraph.draft.ngram_head import NgramHead
from specgraph.draft.protocol import BlockHead, DraftHead, DraftOutput, MaskedHead, ParallelHead, StepwiseHead
from specgraph.models.from_modules import eagle3_head_from_module, eagle_head_from_module
from specgraph.models.target import Target, TargetOutput

__all__ = [
    "BlockHead",
    "DraftHead",
    "DraftOutput",
    "MaskedHead",
    "NextLogits",
    "NgramHead",
    "OutputProjection",
    "ParallelHead",
    "RowLogits",
    "StepwiseHead",
    "Target",
    "TargetOutput",
    "eagle3_head_from_module",
    "eagle_head_from_module",
]
