"""Targets and draft heads as plain tensor code: no files, no device names, no graph calls.

`protocol` states what a model of your own must offer. `specgraph.checkpoints` builds the models here from folders.
"""

from specgraph.models.protocol import (
    DraftHead,
    DraftOutput,
    MaskedHead,
    OutputProjection,
    ParallelHead,
    StepwiseHead,
    Target,
    TargetOutput,
)

__all__ = [
    "DraftHead",
    "DraftOutput",
    "MaskedHead",
    "OutputProjection",
    "ParallelHead",
    "StepwiseHead",
    "Target",
    "TargetOutput",
]
