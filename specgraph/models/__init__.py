"""Targets and draft heads as plain tensor code: no files, no device names, no graph calls.

`protocol` states what a model of your own must offer. `specgraph.checkpoints` builds the models here from folders,
`eagle_head_from_module` and `eagle3_head_from_module` from the modules of an engine.
"""

from specgraph.models.from_modules import eagle3_head_from_module, eagle_head_from_module
from specgraph.models.logits import NextLogits, OutputProjection, RowLogits
from specgraph.models.ngram import NgramHead
from specgraph.models.protocol import (
    BlockHead,
    DraftHead,
    DraftOutput,
    MaskedHead,
    ParallelHead,
    StepwiseHead,
    Target,
    TargetOutput,
)

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
