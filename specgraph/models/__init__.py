"""Targets and drafters as plain tensor code, read from Hugging Face folders.

    target = load_target("Llama-3.1-8B-Instruct", device, torch.bfloat16)
    print(drafter_format("EAGLE3-LLaMA3.1-Instruct-8B"))     # eagle3, authors layout (...)
    head = load_drafter("EAGLE3-LLaMA3.1-Instruct-8B", target)

`protocol` says what a model of one's own must offer. `layers` is the one place where a device's fused ops step in.
"""

from specgraph.models.formats import DrafterFormat
from specgraph.models.load import drafter_format, load_drafter, load_target
from specgraph.models.protocol import (
    DraftHead,
    DraftOutput,
    GreedyHead,
    ParallelHead,
    StepwiseHead,
    Target,
    TargetOutput,
)

__all__ = [
    "DraftHead",
    "DraftOutput",
    "DrafterFormat",
    "GreedyHead",
    "ParallelHead",
    "StepwiseHead",
    "Target",
    "TargetOutput",
    "drafter_format",
    "load_drafter",
    "load_target",
]
