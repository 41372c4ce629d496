"""Capturing bodies of device work once and replaying them: sizes, dispatch, updates, and the read-set guard."""

from specgraph.graphs.attend import AttentionStack, MakeAttend, PassMode
from specgraph.graphs.dispatch import (
    BatchDescriptor,
    Dispatch,
    Phase,
    capture_sizes,
    dispatch,
    padded_size,
    prefill_sizes,
)
from specgraph.graphs.read_set import Fingerprint, ReadSet, ReadSetGuard, fingerprint
from specgraph.graphs.runner import Body, Captured, GraphRunner, Recording, StepLengths
from specgraph.graphs.update_plan import UpdatePlan

__all__ = [
    "AttentionStack",
    "BatchDescriptor",
    "Body",
    "Captured",
    "Dispatch",
    "Fingerprint",
    "GraphRunner",
    "MakeAttend",
    "PassMode",
    "Phase",
    "ReadSet",
    "ReadSetGuard",
    "Recording",
    "StepLengths",
    "UpdatePlan",
    "capture_sizes",
    "dispatch",
    "fingerprint",
    "padded_size",
    "prefill_sizes",
]
